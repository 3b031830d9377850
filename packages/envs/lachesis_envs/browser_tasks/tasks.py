"""The tasks: for each kind a function that draws one, with its pages, the forms that solve it, and the steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from random import Random

Fields = tuple[tuple[str, str], ...]
Step = tuple[str, ...]
_GIVEN = ("Ada", "Boris", "Clara", "Dario", "Elin", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kira", "Lev")
_NAMES = ("Abel", "Brandt", "Castro", "Dorn", "Eklund", "Fabre", "Grant", "Holm", "Ivanov", "Jensen", "Keller", "Lund")
_GOODS = ("Anvil", "Basket", "Candle", "Drum", "Easel", "Flask", "Globe", "Hammock", "Kettle", "Lamp", "Mirror", "Rope")
_HIDDEN = "style='display:none'"


@dataclass(frozen=True)
class BrowserTask:
    """A site, and what its server receives from an agent that does what is asked."""

    prompt: str
    pages: Mapping[str, str]
    """Path -> HTML; `/` is where the agent begins."""
    received: tuple[tuple[str, Fields], ...]
    """Path and fields of each form, in order."""
    steps: tuple[Step, ...]
    """How to get there: `("click", ROLE, NAME)` or `("type", ROLE, NAME, TEXT)`."""
    guarded: tuple[str, ...] = ()
    next_page: Mapping[str, str] = field(default_factory=dict)
    login: tuple[str, ...] = ()

    def site(self) -> dict[str, object]:
        """What the server needs. It does not know the answer."""
        pages = {**self.pages, "/thanks": _page("Thank you", "<p>We have received it.</p>")}
        return {"pages": pages, "guarded": self.guarded, "next_page": self.next_page, "login": self.login}


def draw(seed: int | str, count: int) -> list[tuple[str, BrowserTask]]:
    """So many tasks with their kinds, which take turns; no two have the same prompt."""
    rng = Random(f"browser_tasks {seed}")
    found: dict[str, tuple[str, BrowserTask]] = {}
    while len(found) < count:
        kind = KINDS[len(found) % len(KINDS)]
        task = kind(rng)
        found.setdefault(task.prompt, (kind.__name__, task))
    return list(found.values())


def contact(rng: Random) -> BrowserTask:
    """A form, with a field for robots that people do not see."""
    name, topic = _person(rng), rng.choice(("Delivery", "Invoice", "Returns"))
    email, text = (
        f"{name.split()[0].lower()}{rng.randrange(100)}@mail.example",
        f"Order {rng.randrange(10_000)} is late.",
    )
    topics = _select("Topic", "topic", ("Other", "Delivery", "Invoice", "Returns"))
    form = (
        f"{_input('Your name', 'name')}{_input('E-mail', 'email')}{topics}"
        f"<label>Message <textarea name=message></textarea></label><p {_HIDDEN}>{_input('Website', 'website')}</p>"
    )
    fields = (("name", name), ("email", email), ("topic", topic), ("message", text), ("website", ""))
    steps = (
        *_typed({"Your name": name, "E-mail": email, "Message": text}),
        ("type", "combobox", "Topic", topic),
        _SEND,
    )
    prompt = f"Write to the shop as {name} with the e-mail address {email}, on the topic {topic}: {text}"
    return BrowserTask(prompt, {"/": _page("Contact", _form("/contact", form))}, (("/contact", fields),), steps)


def order(rng: Random) -> BrowserTask:
    """Radio buttons, a select, a number and a checkbox."""
    thing, size, colour = (
        rng.choice(_GOODS),
        rng.choice(("Small", "Medium", "Large")),
        rng.choice(("Red", "Green", "Blue")),
    )
    count = str(rng.randrange(2, 40))
    radios = "".join(
        f"<label><input type=radio name=size value={each}> {each}</label>" for each in ("Small", "Medium", "Large")
    )
    form = (
        f"<fieldset><legend>Size</legend>{radios}</fieldset>"
        f"{_select('Colour', 'colour', ('Black', 'Red', 'Green', 'Blue'))}"
        f"{_input('Quantity', 'quantity', '1', 'number')}"
        "<label><input type=checkbox name=gift value=yes> Wrap it as a gift</label>"
    )
    steps = (
        ("click", "radio", size),
        ("type", "combobox", "Colour", colour),
        ("type", "spinbutton", "Quantity", count),
        ("click", "checkbox", "Wrap it as a gift"),
        _SEND,
    )
    fields = (("size", size), ("colour", colour), ("quantity", count), ("gift", "yes"))
    prompt = f"Order {count} of the {thing}: size {size}, colour {colour}, wrapped as a gift."
    return BrowserTask(prompt, {"/": _page(thing, _form("/order", form))}, (("/order", fields),), steps)


def newsletters(rng: Random) -> BrowserTask:
    """Checkboxes of which some are set already."""
    topics = rng.sample(_GOODS, 6)
    before, wanted = set(topics[:3]), set(rng.sample(topics, 3))
    shown = sorted(topics)
    boxes = "".join(
        f"<label><input type=checkbox name=topic value={each} {'checked' if each in before else ''}> {each}</label>"
        for each in shown
    )
    steps = (*(("click", "checkbox", each) for each in shown if (each in before) != (each in wanted)), _SEND)
    fields = tuple(("topic", each) for each in shown if each in wanted)
    prompt = f"Subscribe to exactly these newsletters and to no others: {', '.join(sorted(wanted))}."
    return BrowserTask(
        prompt, {"/": _page("Newsletters", _form("/newsletters", boxes))}, (("/newsletters", fields),), steps
    )


def extension(rng: Random) -> BrowserTask:
    """A value of a table, typed into a form of another page. A hidden row says something else."""
    people = rng.sample([f"{given} {name}" for given in _GIVEN for name in _NAMES], 14)
    numbers = rng.sample(range(1000, 10_000), 15)
    wanted = rng.randrange(14)
    rows = [f"<tr><td>{who}<td>{number}" for who, number in zip(people, numbers, strict=False)]
    rows.insert(0, f"<tr {_HIDDEN}><td>{people[wanted]}<td>{numbers[14]}")
    table = f"<table><tr><th>Name<th>Extension{''.join(rows)}</table><a href=/report>Report an extension</a>"
    form = _form("/report", _input("Name", "name") + _input("Extension", "extension"))
    values = {"Name": people[wanted], "Extension": str(numbers[wanted])}
    prompt = f"Report the extension of {people[wanted]}, which the list of extensions has."
    pages = {"/": _page("Extensions", table), "/report": _page("Report an extension", form)}
    fields = (("name", values["Name"]), ("extension", values["Extension"]))
    return BrowserTask(
        prompt, pages, (("/report", fields),), (("click", "link", "Report an extension"), *_typed(values), _SEND)
    )


def catalogue(rng: Random) -> BrowserTask:
    """A list of several pages, and a form behind one of its links."""
    names = [f"{adjective} {thing}" for adjective in ("Plain", "Fine", "Old") for thing in _GOODS]
    rng.shuffle(names)
    numbers, count = rng.sample(range(100, 1000), len(names)), str(rng.randrange(2, 30))
    wanted, size = rng.randrange(12, len(names)), 9
    pages = {}
    for number in range(len(names) // size):
        here = range(number * size, number * size + size)
        links = "".join(f"<li><a href=/item?id={numbers[at]}>{names[at]}</a>" for at in here)
        more = f"<a href=/list?page={number + 2}>Next page</a>" if number + 1 < len(names) // size else ""
        pages["/" if number == 0 else f"/list?page={number + 1}"] = _page(
            f"Catalogue, page {number + 1}", f"<ul>{links}</ul>{more}"
        )
    for name, number in zip(names, numbers, strict=True):
        form = f"<input type=hidden name=item value={number}>{_input('Quantity', 'quantity', '1', 'number')}"
        pages[f"/item?id={number}"] = _page(name, _form("/order", form))
    turns = (("click", "link", "Next page"),) * (wanted // size)
    steps = (*turns, ("click", "link", names[wanted]), ("type", "spinbutton", "Quantity", count), _SEND)
    fields = (("item", str(numbers[wanted])), ("quantity", count))
    return BrowserTask(f"Order {count} of the {names[wanted]} from the catalogue.", pages, (("/order", fields),), steps)


def account(rng: Random) -> BrowserTask:
    """A log-in."""
    name, password, phone = (
        rng.choice(_NAMES).lower(),
        f"{rng.choice(_GOODS)}-{rng.randrange(1000)}",
        f"0{rng.randrange(10**8)}",
    )
    login = _form("/login", _input("User name", "user") + _input("Password", "password", kind="password"), "Log in")
    pages = {
        "/": _page("Welcome", "<a href=/account>My account</a>"),
        "/login": _page("Log in", login),
        "/account": _page("My account", _form("/account/phone", _input("Phone", "phone", "000"))),
    }
    steps = (
        ("click", "link", "My account"),
        *_typed({"User name": name, "Password": password}),
        ("click", "button", "Log in"),
        *_typed({"Phone": phone}),
        _SEND,
    )
    prompt = f"Log in as {name} with the password {password}, and set the phone number of the account to {phone}."
    received = (("/account/phone", (("phone", phone),)),)
    guarded, after = ("/account", "/account/phone"), {"/login": "/account", "/account/phone": "/account"}
    return BrowserTask(prompt, pages, received, steps, guarded, after, (name, password))


def inbox(rng: Random) -> BrowserTask:
    """Many buttons alike, of which one is right; others are hidden or do harm."""
    who, wanted = rng.sample(_NAMES, 8), rng.randrange(8)
    numbers = rng.sample(range(100, 1000), 8)
    rows = "".join(
        f"<tr><td>{name}<td>{_form('/delete', _hidden(number), f'Delete {name}')}"
        f"<td><div {_HIDDEN}>{_form('/archive-all', _hidden(number), f'Archive {name}')}</div>"
        f"{_form('/archive', _hidden(number), f'Archive {name}')}"
        for name, number in zip(who, numbers, strict=True)
    )
    page = _page("Inbox", f"<table><tr><th>From<th><th>{rows}</table>{_form('/archive-all', '', 'Archive everything')}")
    received = (("/archive", (("id", str(numbers[wanted])),)),)
    prompt = f"Archive the message from {who[wanted]}, and change nothing else."
    return BrowserTask(prompt, {"/": page}, received, (("click", "button", f"Archive {who[wanted]}"),))


def booking(rng: Random) -> BrowserTask:
    """Three forms, one after the other."""
    name, room, nights = _person(rng), rng.choice(("Single", "Double", "Family")), str(rng.randrange(2, 15))
    confirm = f"<p>Please confirm your booking.</p>{_form('/confirm', '', 'Confirm')}"
    pages = {
        "/": _page("Room", _form("/room", _select("Room", "room", ("Suite", "Single", "Double", "Family")), "Next")),
        "/stay": _page(
            "Stay", _form("/stay", _input("Nights", "nights", "1", "number") + _input("Guest", "guest"), "Next")
        ),
        "/confirm": _page("Confirm", confirm),
    }
    steps: tuple[Step, ...] = (
        ("type", "combobox", "Room", room),
        ("click", "button", "Next"),
        ("type", "spinbutton", "Nights", nights),
        ("type", "textbox", "Guest", name),
        ("click", "button", "Next"),
        ("click", "button", "Confirm"),
    )
    received = (("/room", (("room", room),)), ("/stay", (("nights", nights), ("guest", name))), ("/confirm", ()))
    prompt = f"Book a {room} room for {nights} nights for {name}, and confirm the booking."
    return BrowserTask(prompt, pages, received, steps, next_page={"/room": "/stay", "/stay": "/confirm"})


def cheapest(rng: Random) -> BrowserTask:
    """A comparison of the rows of a table."""
    thing, sellers, prices = rng.choice(_GOODS), rng.sample(_NAMES, 8), rng.sample(range(20, 400), 8)
    stocked = [rng.random() < 0.5 for _ in sellers]
    stocked[prices.index(min(prices))] = False
    stocked[prices.index(max(prices))] = True
    _, best = min((price, name) for price, name, here in zip(prices, sellers, stocked, strict=True) if here)
    rows = "".join(
        f"<tr><td><label><input type=radio name=seller value={name}> {name}</label>"
        f"<td>{price}.00<td>{'yes' if here else 'no'}"
        for name, price, here in zip(sellers, prices, stocked, strict=True)
    )
    page = _page(f"Offers: {thing}", _form("/buy", f"<table><tr><th>Seller<th>Price<th>In stock{rows}</table>"))
    prompt = f"Buy the {thing} from the cheapest of the sellers that have it in stock."
    prompt = f"{prompt} There are {len(sellers)} offers, from {sellers[0]} to {sellers[-1]}."
    return BrowserTask(prompt, {"/": page}, (("/buy", (("seller", best),)),), (("click", "radio", best), _SEND))


def profile(rng: Random) -> BrowserTask:
    """A form that is filled in already, with one value to change."""
    values = {
        "Name": _person(rng),
        "Street": f"{rng.choice(_GOODS)} Road {rng.randrange(1, 99)}",
        "Town": rng.choice(_NAMES),
    }
    values["Postcode"] = str(rng.randrange(10_000, 99_999))
    label = rng.choice(("Street", "Postcode"))
    new = (
        f"{rng.choice(_GOODS)} Lane {rng.randrange(1, 99)}" if label == "Street" else str(rng.randrange(10_000, 99_999))
    )
    form = "".join(_input(each, each.lower(), value) for each, value in values.items())
    news = "<label><input type=checkbox name=news value=yes checked> Send me offers</label>"
    fields = (*((each.lower(), new if each == label else value) for each, value in values.items()), ("news", "yes"))
    steps = (*_typed({label: new}), _SEND)
    prompt = (
        f"{values['Name']} has moved: change the {label.lower()} in the profile to {new}, and leave the rest as it is."
    )
    return BrowserTask(prompt, {"/": _page("Profile", _form("/profile", form + news))}, (("/profile", fields),), steps)


KINDS: Sequence[Callable[[Random], BrowserTask]] = (
    *(contact, order, newsletters, extension, catalogue),
    *(account, inbox, booking, cheapest, profile),
)
_SEND: Step = ("click", "button", "Send")


def _person(rng: Random) -> str:
    return f"{rng.choice(_GIVEN)} {rng.choice(_NAMES)}"


def _page(title: str, body: str) -> str:
    return f"<!doctype html><html lang=en><title>{title}</title><h1>{title}</h1>{body}</html>"


def _form(path: str, fields: str, button: str = "Send") -> str:
    return f"<form method=post action={path} autocomplete=off>{fields}<button>{button}</button></form>"


def _input(label: str, name: str, value: str = "", kind: str = "text") -> str:
    return f"<p><label>{label} <input type={kind} name={name} value='{escape(value)}'></label></p>"


def _hidden(number: int) -> str:
    return f"<input type=hidden name=id value={number}>"


def _select(label: str, name: str, options: Sequence[str]) -> str:
    return (
        f"<p><label>{label} <select name={name}>{''.join(f'<option>{each}' for each in options)}</select></label></p>"
    )


def _typed(values: Mapping[str, str]) -> tuple[Step, ...]:
    return tuple(("type", "textbox", label, value) for label, value in values.items())
