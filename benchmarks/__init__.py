"""What reused workers save: measured beside stock, on the machine that this is run on.

``python -m benchmarks --quick`` runs small suites on stock and on reused workers and compares
seconds and outcomes (two minutes on two cores); ``python -m benchmarks.overhead`` measures what the
harness itself costs, beside stock and beside torch's own continuous class (about five minutes).
Neither fails for a speed, which is the machine's affair; both fail for an outcome.

============== =====================================================================
module         holds
============== =====================================================================
``arms``       what a class derives from, by environment variable
``suites/``    suites in stock style, runnable on either base
``comparison`` one suite on one arm; what many runs come to
``__main__``   the command for the suites
``probes/``    tests that cost nothing but their harness; the driver that times them
``overhead``   the command for the probes
``processes``  a Python process with a deadline
``tables``     tables for a terminal and for a pull request
============== =====================================================================
"""
