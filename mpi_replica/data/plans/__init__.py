"""What the verbs of a dataset do: which position of the source, in which epoch.

Where rows can be reached by position (`indexable`) a verb only computes positions, and the source
reads last: nothing is read that was not asked for. Elsewhere elements stream by. All of it is a
function of (epoch, position), so that every rank, and a run that goes on later, gets the same.
"""
