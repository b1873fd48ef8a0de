"""Holds what the switches of both frameworks put in the place of the original code."""
