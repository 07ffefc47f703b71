"""Jobs whose ranks are killed at chosen moments; scripts/chaos.py runs many of them.

A *moment* is an event of a rank: it comes to a call of the transport or of what makes the rank go
on, or returns from it. Events are counted, all of them and those within a phase (a commit, a
recovery), so that the same moment can be had again.
"""
