"""What scripts/bench.py measures: one file for each table, beside those that tables share.

launching.py   which Python has which MPI library, and how it is started on some ranks
measuring.py   what runs on the ranks: batches of all sides in turn
nests.py       what is reduced: ResNet-50's gradients and others
by_hand.py     reductions as an expert writes them with mpi4py
peers.py       reductions of other packages, where they are installed
networks.py    what is trained with torch
mirror.py      a rank among thousands, all of which do what it does
network_model.py  what MPI calls take on networks that were measured elsewhere
tables.py      rows, and how they are printed
plotting.py    tables as pictures

A table is a module with a docstring, whose first line is its title, and

``launches(settings)``
    What to start for one MPI library, as `launching.Launch` objects. Each names a *part*: a
    function of the module that runs on every rank, ``part(world, **arguments)``. What it yields on
    rank 0 is kept, and what any rank gives to ``world.tell``: rows, or records, dicts that JSON can
    hold.
``rows(outcomes)``, optional
    The `tables.Row` objects, made of the `launching.Outcome` of each launch, in the order in which
    they are printed. Without it they are those that the parts yielded.
``footer(rows)``, optional
    A last line.
``NEEDS_ARRAYS``, optional
    True where the ranks need torch: they are started with an interpreter that has it.
"""

#: The modules, in the order in which they are measured.
NAMES = (
    "calls",
    "agreement",
    "all_reduce",
    "sizes",
    "all_gather",
    "broadcast",
    "merge_call",
    "narrow",
    "gradients",
    "reproducible",
    "memory",
    "datasets",
    "checkpoint",
    "elastic",
    "trace",
    "startup",
    "ranks",
    "growth",
    "scale",
    "hosts",
    "misuse",
)

#: What `all` stands for: what things cost. How soon mistakes are told is another question, and
#: hosts only root may make.
ALL = tuple(name for name in NAMES if name not in ("hosts", "misuse"))
