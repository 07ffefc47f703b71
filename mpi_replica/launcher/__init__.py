"""Starting a program on several ranks: the library's own launcher, told what it needs."""
