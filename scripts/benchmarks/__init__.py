"""What scripts/bench.py measures: one file for each table, beside those that all tables share.

launching.py   which Python has which MPI library, and how it is started on some ranks
measuring.py   what runs on the ranks: batches of ours and of the yardstick in turn
tables.py      rows, and how they are printed

A table is a module with a docstring, whose first line is its title, and

``launches(settings)``
    What to start for one MPI library, as `launching.Launch` objects. Each names a *part*: a
    function of the module that runs on every rank, ``part(world, **arguments)``. What it yields on
    rank 0 is kept, and what any rank gives to ``world.tell``: records, dicts that JSON can hold.
``rows(outcomes)``
    The `tables.Row` objects, made of the `launching.Outcome` of each launch, in the order in which
    they are printed.
``COMPARED``, optional
    What stands above the column of ``Row.compared``.
``footer(rows)``, optional
    A last line.
"""

#: The modules, in the order in which they are measured.
NAMES = ("agreement", "misuse")
