"""The console: web pages for operators who look before they read. `pushrep console`; needs the extra `console`.

watch.py       looks at places again and again, by the function of `pushrep status`, and keeps an hour of it
pages.py       readings in, rows out: pure; what is worst, rates, what to do about each problem
records.py     records of one log: payloads only where they are asked for
startpoints.py  what waits, what happened, what one more would do
access.py      who may do what: names, passwords, sessions, forms
drawing.py     bars and lines as SVG: pure
web.py         Starlette: a route for each page, and the server
templates/     Jinja2; static/ what browsers load: our own style and script, and idiomorph
"""
