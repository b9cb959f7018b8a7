"""Labels of several annotators per row: the most probable class of each row, and how good each annotator is."""
