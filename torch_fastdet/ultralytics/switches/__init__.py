"""One file for each switch; registry.py lists them."""
