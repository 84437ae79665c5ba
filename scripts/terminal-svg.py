#!/usr/bin/env python3
"""Draws the output of a command as an SVG, for the documents.

    terminal-svg.py TITLE <output >picture.svg

The text is drawn as it is.
"""

import html
import sys

WIDTH, HEIGHT, MARGIN = 8.4, 19, 16


def main(title):
    lines = sys.stdin.read().rstrip("\n").split("\n")
    width = round(max(map(len, [title, *lines])) * WIDTH + 2 * MARGIN)
    height = HEIGHT * (len(lines) + 2) + MARGIN
    print(f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img">')
    print(f"<title>{html.escape(title)}</title>")
    print(f'<rect width="{width}" height="{height}" rx="8" fill="#10243e"/>')
    print('<g font-family="ui-monospace, monospace" font-size="14" xml:space="preserve">')
    for number, line in enumerate([f"$ {title}", "", *lines]):
        colour = "#9fc3ee" if number == 0 else "#f4f7fb"
        y = MARGIN + HEIGHT * number + HEIGHT // 2
        if line:
            print(f'<text x="{MARGIN}" y="{y}" fill="{colour}">{html.escape(line)}</text>')
    print("</g></svg>")


main(sys.argv[1])
