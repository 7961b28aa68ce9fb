r"""README's moving picture: trained policies side by side, in real time.

    pip install "gymnasium[box2d,mujoco]"
    python grpo_rtg.py --env-id docs.examples.dispatch:Dispatch-v0 --norm-obs --ent-coef 0
    python grpo_rtg.py --env-id LunarLander-v3 --total-timesteps 1000000 --ent-coef 0
    python grpo_rtg.py --env-id HalfCheetah-v5 --total-timesteps 500000 --num-groups 1 \
        --group-size 4 --minibatch-size 256 --learning-rate 1e-3 --norm-obs --log-std-init -2 \
        --gamma 0.95 --ent-coef 0
    python grpo_rtg.py --evaluate runs/<run>/checkpoint.pt --capture-video --eval-episodes 1
    python docs/figures/movie.py VIDEO VIDEO VIDEO

HalfCheetah is filmed with --env-kwargs '{"width": 240, "height": 180, "camera_name": "track"}'.

A video that is over stands still until the last one is.
"""

import argparse
from pathlib import Path

from moviepy import VideoFileClip
from PIL import Image

TARGET = Path(__file__).parent / "trained.gif"
HEIGHT = 180
GAP = 10  # pixels between videos
FPS = 10
SECONDS = 9  # at most
COLOURS = 96


def frames(path: str) -> list[Image.Image]:
    """A video's frames, FPS to the second."""
    with VideoFileClip(path) as clip:
        end = min(SECONDS, clip.duration)
        images = [Image.fromarray(x) for x in clip.subclipped(0, end).iter_frames(fps=FPS)]
    width = round(images[0].width * HEIGHT / images[0].height)
    return [image.resize((width, HEIGHT), Image.Resampling.LANCZOS) for image in images]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("videos", nargs="+", help="what --capture-video recorded, from the left")
    videos = [frames(path) for path in parser.parse_args().videos]
    width = sum(video[0].width + GAP for video in videos) - GAP
    pictures = []
    for i in range(max(map(len, videos))):
        picture = Image.new("RGB", (width, HEIGHT), "white")
        left = 0
        for video in videos:
            picture.paste(video[min(i, len(video) - 1)], (left, 0))
            left += video[0].width + GAP
        pictures.append(picture)
    sample = Image.new("RGB", (width, HEIGHT * 4))  # of four pictures, for the palette
    for i in range(4):
        sample.paste(pictures[i * len(pictures) // 4], (0, i * HEIGHT))
    palette = sample.quantize(COLOURS)
    pictures = [x.quantize(palette=palette, dither=Image.Dither.NONE) for x in pictures]
    options = {"save_all": True, "append_images": pictures[1:], "loop": 0}
    pictures[0].save(TARGET, duration=1000 // FPS, optimize=True, **options)
    print(
        f"{TARGET}: {len(pictures)} pictures, {width} x {HEIGHT}, {TARGET.stat().st_size:,} bytes"
    )


if __name__ == "__main__":
    main()
