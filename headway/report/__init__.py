"""Pictures and pages: SVG drawn by hand for pages that need no network, matplotlib for files."""
