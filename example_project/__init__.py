"""An example of a project that uses django-jobqueue: documents that are read by jobs."""
