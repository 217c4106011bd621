"""What people do to jobs in the Django admin."""
