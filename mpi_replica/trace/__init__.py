"""What the ranks of a job have written of their time, as one trace: a file, a table, a picture."""
