"""The default for tables and feature vectors: several models, combined by how well they predict trusted rows."""
