"""A run's folder: written while it runs, and read for the page and for other people's tools."""
