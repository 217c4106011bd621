"""The tests mirror the package; see CONTRIBUTING.md for the database they run on."""
