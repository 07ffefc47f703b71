"""What scripts/bench.py measures: one file for each table, beside those that all tables share.

launching.py   which Python has which MPI library, and how it is started on some ranks
measuring.py   what runs on the ranks: batches of ours and of the yardstick in turn
tables.py      rows, and how they are printed

A table is a module with a docstring, whose first line is its title, and

``launches(settings)``
    What to start for one MPI library, as `launching.Launch` objects. Each names a *part*: a
    function of the module that runs on every rank, ``part(world, **arguments)``, and yields records
    (what JSON can hold); those of rank 0 are kept.
``rows(records)``
    The `tables.Row` objects made of all records, in the order in which they are printed.
``footer(rows)``, optional
    A last line.
``ended(launch, outcome)``, optional
    The records of a part that ends its process, from exit status, output and duration; without it
    such an end is an error.
"""

#: The modules, in the order in which they are measured.
NAMES = ("agreement", "misuse")
