"""Two programs that test a candidate, each in its own sandbox: `candidate` runs it, and `judge` runs the tests.

They import nothing from tot: `tot.tasks.checks` copies them into the sandboxes, with `plain`, which both import.
"""
