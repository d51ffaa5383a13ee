"""The migration codemod: ``torchcontinuous-migrate``, ``python -m torchcontinuous.migrate``.

It changes the parent class of test classes from torch's to this package's, and nothing else; judges
which of them can share workers; and runs them before and after, to show that no outcome changed.

====== ================= ====================================================================
layer  module            holds
====== ================= ====================================================================
0      ``_table``        which of torch's classes is replaced by which
       ``_files``        finding, reading and writing files
1      ``_module``       one file, parsed (LibCST)
2      ``_project``      classes and what they derive from, across files
3      ``_judge``        signs that a class or test cannot share workers
       ``_edit``         changing one file: parents, imports, isolation
4      ``_plan``         what is to be changed in which file, and back
       ``_run``          the process that runs one file's tests in an order
5      ``_verify``       running on stock and migrated until nothing differs
6      ``_report``       the table of what was run; progress
7      ``_session``      a verification in place, which can be interrupted and resumed
8      ``_command``      what the command does
9      ``__main__``      the command
====== ================= ====================================================================
"""
