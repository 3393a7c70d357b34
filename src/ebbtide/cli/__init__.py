"""The command line: flags in, text or JSON out."""
