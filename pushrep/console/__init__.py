"""The console: web pages for operators. `pushrep console`; needs the extra `console`.

watch.py       reads the status of every place periodically, as `pushrep status` does, and keeps an hour of it
pages.py       status readings in, rows out: pure; the worst first, rates, what to do about each problem
records.py     records of one log: payloads only on request
startpoints.py  pending startpoints, their history, what a new one would do
access.py      who may do what: names, passwords, sessions, forms
drawing.py     bars and lines as SVG: pure
web.py         Starlette: a route for each page, and the server
templates/     Jinja2; static/ what browsers load: our own style and script, and idiomorph
"""
