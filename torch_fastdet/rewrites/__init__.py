"""Changes a model for a captured step, so that it has fewer copies."""
