"""Calibration data for any checkpoint: a few texts of different kinds, and pictures drawn here."""

from __future__ import annotations

import random
from typing import Any

from PIL import Image, ImageDraw

TEXTS = (
    "The harbour was quiet when the ferry came in. Two men in yellow coats caught the ropes, and the first "
    "cars rolled slowly down the ramp, their headlights still on in the grey morning light. Nobody was in a "
    "hurry.",
    "To solve 3x + 7 = 22, subtract 7 from both sides: 3x = 15. Divide by 3: x = 5. Check: 3 * 5 + 7 = 15 + 7 = 22.",
    "def median(values):\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n    if len(ordered) % "
    "2:\n        return ordered[middle]\n    return (ordered[middle - 1] + ordered[middle]) / 2\n",
    "Water expands when it freezes because its molecules settle into an open lattice. Ice is therefore lighter "
    "than the water below it, lakes freeze from the top, and fish survive the winter underneath.",
    "Am Montag beginnt der Kurs um neun Uhr. Bitte bringen Sie Papier, einen Bleistift und etwas Geduld mit; "
    "Vorkenntnisse sind nicht nötig, Fragen sind willkommen.",
    "La bibliothèque ferme à dix-huit heures, sauf le jeudi. Les livres empruntés doivent être rendus dans un "
    "délai de trois semaines, faute de quoi une petite amende est due.",
    "El mercado abre temprano. A las siete ya huele a pan, a naranjas y a café, y los vendedores discuten en "
    "voz alta sobre el precio del pescado.",
    "今天下午我们去公园散步,天气很好,孩子们在湖边放风筝。晚上回家以后,大家一起做饭,吃完饭又看了一部老电影。",
    "駅までは歩いて十分ほどです。角を右に曲がると、小さなパン屋があります。朝の七時から開いています。",
    '{"order": 1842, "items": [{"name": "lamp", "price": 39.5, "count": 2}, {"name": "cable", '
    '"price": 7.25, "count": 4}], "paid": true, "note": null}',
    "| city | inhabitants | river |\n|---|---|---|\n| Lyon | 522,000 | Rhône |\n| Turin | 848,000 | Po |\n| "
    "Basel | 174,000 | Rhine |\n",
    "Step 1. Switch the device off and unplug it. Step 2. Remove the four screws on the back. Step 3. Lift the "
    "cover carefully; the ribbon cable is short. Step 4. Replace the battery and close the cover again.",
    "SELECT department, COUNT(*) AS staff, AVG(salary) FROM employees WHERE hired >= '2015-01-01' GROUP BY "
    "department HAVING COUNT(*) > 3 ORDER BY staff DESC;",
    "A triangle with sides 3, 4 and 5 has a right angle, since 9 + 16 = 25. Its area is 6, its perimeter 12, "
    "and the radius of its inscribed circle is 1.",
    "Dear Ms Okafor, thank you for your letter of 4 March. We have checked your account and found that the "
    "amount of 84.20 was charged twice. The second payment will be returned within five working days. Kind "
    "regards, Customer Service",
    "In a distributed system a lease is a promise with a date on it. When the holder stops renewing it, the "
    "resource is free again, and no message from the holder is needed for that.",
)
QUESTIONS = (
    "What do you see in this picture?",
    "Describe the image in one sentence.",
    "Which colours are in the picture?",
    "How many objects are there?",
    "Read the text in the image.",
)
SIZES = ((256, 256), (384, 256), (256, 448), (512, 512), (640, 352))


def generic_samples(num_samples: int, *, with_images: bool, with_chat: bool, seed: int = 0) -> list[dict[str, Any]]:
    """Alternately texts and chats, every second chat about a picture; the form of one line of a calibration file.

    An image part holds a PIL image. Without a chat template (`with_chat`) everything is raw text.
    """
    rng = random.Random(seed)
    samples: list[dict[str, Any]] = []
    for index in range(num_samples):
        if index % 2 == 0 or not with_chat:
            samples.append({"text": " ".join(rng.sample(TEXTS, 3))})
        elif with_images and index % 4 == 3:
            picture = {"type": "image", "image": draw_picture(rng)}
            content = [picture, {"type": "text", "text": rng.choice(QUESTIONS)}]
            samples.append({"messages": [{"role": "user", "content": content}], "answer": rng.choice(TEXTS)})
        else:
            question = f"Explain this in other words:\n\n{rng.choice(TEXTS)}"
            samples.append({"messages": [{"role": "user", "content": question}], "answer": rng.choice(TEXTS)})
    return samples


def draw_picture(rng: random.Random) -> Image.Image:
    """A colour gradient, some noise, figures and a line of text."""
    width, height = rng.choice(SIZES)
    image = _gradient(rng, width, height)
    noise = Image.effect_noise((width, height), rng.uniform(10, 80)).convert("RGB")
    image = Image.blend(image, noise, rng.uniform(0, 0.4))
    pen = ImageDraw.Draw(image)
    for _ in range(rng.randint(1, 6)):
        x, y, radius = rng.randrange(width), rng.randrange(height), rng.randint(12, 90)
        box = (x - radius, y - radius, x + radius, y + radius)
        rng.choice((pen.ellipse, pen.rectangle))(box, fill=_colour(rng), outline=_colour(rng), width=3)
    pen.text((rng.randrange(width // 2), rng.randrange(height - 20)), rng.choice(QUESTIONS), fill=_colour(rng))
    return image


def _gradient(rng: random.Random, width: int, height: int) -> Image.Image:
    top, bottom = Image.new("RGB", (width, height), _colour(rng)), Image.new("RGB", (width, height), _colour(rng))
    mask = Image.linear_gradient("L").rotate(rng.choice((0, 90, 180, 270))).resize((width, height))
    return Image.composite(top, bottom, mask)


def _colour(rng: random.Random) -> tuple[int, int, int]:
    return rng.randrange(256), rng.randrange(256), rng.randrange(256)
