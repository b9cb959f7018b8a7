"""Import of Label Studio exports, and export of tasks with suggestions and decisions."""
