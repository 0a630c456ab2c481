"""Report of a training run: one HTML page made from the record that `trackbed.open_run` keeps.

`write.py` reads the record and publishes the page. Between the two, `plan.py` and the modules beside it compute the
numbers, `svg.py` draws them, and `page.py` lays them out.
"""
