"""What a captured step changes in a model, so that it has fewer copies."""
