"""What the switches of both hosts put in place of stock's code."""
