"""Charts in Vega-Lite's grammar: data and encodings. Colours of text and axes are the page's."""
