"""Who waits where: a thread that watches, reports of stalls, and a record of the last calls."""
