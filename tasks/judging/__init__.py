"""The two programs that try a candidate: `candidate` runs it, `judge` runs the tests; each in a sandbox of its own.

They import nothing of tot: `tot.tasks.checks` gives them to the sandbox as files, with `plain`, which both use.
"""
