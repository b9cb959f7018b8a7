"""A local page where a person decides which labels are right."""
