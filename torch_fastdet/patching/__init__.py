"""What replaces names of a host, remembers them and puts them back; it knows no host."""
