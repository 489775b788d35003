"""The console: web pages for operators. `pushrep console`; needs the extra `console`.

watch.py        reads the status of each place periodically, as `pushrep status` does, and keeps the last hour
pages.py        computes rows from readings: severities, rates, advice for each problem; pure
records.py      reads records of one log; payloads only on request
startpoints.py  lists startpoints and their history; shows what a new one would do
access.py       authenticates users and checks forms
drawing.py      draws bars and lines as SVG; pure
web.py          the Starlette application, with a route for each page, and the server
templates/      Jinja2 templates
static/         what browsers load: our style sheet and script, and idiomorph
"""
