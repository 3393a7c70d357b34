"""Adapters to the frameworks that people train with. Each imports its own; `import ebbtide` imports none of them."""
