"""The controller part that turns a plan and templates into files."""
