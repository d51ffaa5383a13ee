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
5      ``__main__``      the command
====== ================= ====================================================================
"""
