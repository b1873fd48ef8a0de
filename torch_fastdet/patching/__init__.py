"""Replaces names of a framework, remembers them and puts them back; it knows no framework."""
