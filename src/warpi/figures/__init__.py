"""The paper's figures, and what V has learned, from finished runs."""
