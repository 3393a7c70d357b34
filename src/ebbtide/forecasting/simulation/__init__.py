"""A plan carried out in thought, on a machine that is described. Pure."""
