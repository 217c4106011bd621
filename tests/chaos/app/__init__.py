"""What the workers of the chaos suite run."""
