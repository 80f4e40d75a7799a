#!/bin/sh
# Draws the pictures of the documentation: sh docs/pictures/make.sh (needs zbcompile and chromium).
set -e
here=$(dirname "$0")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
photo() { # url, target, width, height
    chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --virtual-time-budget=3000 \
        --user-data-dir="$work/profile" --screenshot="$2" --window-size="$3,$4" "$1" 2> /dev/null
}
# docs/concepts/pipeline.md; tests/docs/test_site.py compares them.
for fuse in fused:always split:auto; do
    zbcompile plan "$here/equal.json" --cap 1p --fuse "${fuse#*:}" --quiet -o "$work/${fuse%:*}.json"
    zbcompile show "$work/${fuse%:*}.json" --width 90 --svg "$here/${fuse%:*}.svg"
done
# docs/index.md and README.md; tests/test_readme.py compares it.
zbcompile show "$here/../../examples/four-unequal-stages.schedule.json" --svg "$here/../timeline.svg"
# docs/reference/show.md.
zbcompile plan "$here/../../examples/profiles/gpt-1.5b-p8-m64.json" --cap 1p --quiet -o "$work/plan.json"
zbcompile plan "$here/../../examples/profiles/gpt-1.5b-p8-m24.json" --cap 1p --quiet -o "$work/async.json"
zbcompile plan "$here/../../examples/profiles/gpt-1.5b-p8-m24.json" --cap 1p --quiet --transport rendezvous \
    -o "$work/rendezvous.json"
for width in 80 120 200; do
    zbcompile show "$work/plan.json" --width $width --svg "$work/$width.svg"
    size=$(sed -n 's/.*viewBox="0 0 \([0-9]*\)[.0-9]* \([0-9]*\).*/\1 \2/p' "$work/$width.svg" | head -1)
    # shellcheck disable=SC2086
    photo "file://$work/$width.svg" "$here/terminal-$width.png" $size
done
(cd "$work" && zbcompile show rendezvous.json --against async.json --html page.html)
photo "file://$work/page.html#theme=light&follow=5" "$here/page-light.png" 1200 860
photo "file://$work/page.html#theme=dark&from=400000000&to=700000000" "$here/page-dark.png" 1200 860
