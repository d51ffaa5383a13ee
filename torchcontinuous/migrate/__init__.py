"""The migration codemod: ``torchcontinuous-migrate``, ``python -m torchcontinuous.migrate``.

It changes the parent class of test classes from torch's to this package's, and nothing else; judges
which of them can share workers; and runs them before and after, to show that no outcome changed.

====== ================== ===================================================================
layer  module             holds
====== ================== ===================================================================
0      ``_table``         which of torch's classes is replaced by which
       ``_files``         finding, reading and writing files
1      ``_module``        one file, parsed (LibCST)
2      ``_project``       classes and what they derive from, across files
3      ``_judge``         signs that a class or test cannot share workers
       ``_spawning``      whether and how a class starts its processes
       ``_imports``       names and imports of one file
4      ``_edit``          changing one file: parents, imports, isolation
5      ``_plan``          what is to be changed in which file
6      ``_reversal``      the way back
       ``_run``           the process that runs one file's tests in an order
       ``_verify``        running on stock and migrated until nothing differs
7      ``_report``        the table of what was run; progress
8      ``_session``       a verification in place, which can be interrupted and resumed
9      ``_command``       what the command does
10     ``__main__``       the command
====== ================== ===================================================================
"""
