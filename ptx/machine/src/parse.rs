//! Parses the text of PTX into statements, with registers as numbers.

use std::collections::HashMap;

/// The entry of a module.
#[derive(Default)]
pub(super) struct Entry {
    pub(super) name: String,
    /// Name, alignment, size.
    pub(super) parameters: Vec<(String, usize, usize)>,
    pub(super) most_threads: Option<u32>,
    /// The size of a cluster.
    pub(super) cluster: Option<[u32; 3]>,
    pub(super) statements: Vec<Statement>,
    pub(super) labels: HashMap<String, usize>,
    pub(super) registers: usize,
    /// Name, alignment, size (0 for dynamic shared memory).
    pub(super) shared: Vec<(String, usize, usize)>,
    /// Name, alignment, size.
    pub(super) local: Vec<(String, usize, usize)>,
    /// Name, alignment, and bytes.
    pub(super) data: Vec<(String, usize, Vec<u8>)>,
}

pub(super) struct Statement {
    /// A predicate, and whether it must be false.
    pub(super) guard: Option<(Register, bool)>,
    pub(super) opcode: String,
    pub(super) operands: Vec<Operand>,
    pub(super) text: String,
}

pub(super) type Register = usize;

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Operand {
    Register(Register),
    /// What a predicate is not.
    Not(Register),
    Immediate(u64),
    /// The name of something other than a register of the kernel: a parameter, shared memory, a label, or a special register.
    Name(String),
    Vector(Vec<Operand>),
    /// The contents of brackets: a base with an offset, and the coordinates of a tensor.
    Address(Box<Operand>, i64, Vec<Operand>),
}

pub(super) fn parse(ptx: &str) -> Entry {
    let text = without_comments(ptx);
    let mut entry = Entry::default();
    let mut rest = text.trim_start();
    while !rest.is_empty() {
        let word = rest.split_whitespace().next().unwrap();
        if [".version", ".target", ".address_size"].contains(&word) {
            rest = rest.split_once('\n').map_or("", |(_, after)| after);
        } else if word == ".section" {
            rest = rest.split_once('}').map_or("", |(_, after)| after);
        } else if rest.split('(').next().unwrap().contains(".func") && word != ".extern" {
            // Functions of libdevice, which are inlined where they are called.
            rest = after_body(rest);
        } else if word == ".visible" {
            assert!(entry.name.is_empty(), "two entries");
            let (head, body) = rest.split_once('{').expect("an entry has a body");
            head_of(head, &mut entry);
            rest = body_of(body, &mut entry);
        } else if [".extern", ".shared", ".global", ".const", ".weak"].contains(&word) {
            let (declaration, after) = rest.split_once(';').expect("a declaration ends");
            if declaration.contains(".shared") {
                entry.shared.push(declared(declaration));
            } else if !declaration.contains(".func") {
                entry.data.push(data(declaration));
            }
            rest = after;
        } else {
            panic!("not known: {}", rest.lines().next().unwrap());
        }
        rest = rest.trim_start();
    }
    entry
}

/// And without what says from which lines of a source it is.
fn without_comments(ptx: &str) -> String {
    ptx.lines()
        .map(|line| line.split("//").next().unwrap())
        .filter(|line| {
            let word = line.split_whitespace().next();
            !matches!(word, Some(".loc" | ".file"))
        })
        .flat_map(|line| [line, "\n"])
        .collect()
}

/// `.shared .align 4 .b8 name[16]`: name, alignment, size (0 for none).
fn declared(text: &str) -> (String, usize, usize) {
    let words: Vec<_> = text.split_whitespace().collect();
    // What follows `.ptr` is about the memory that a parameter points to.
    let own = words.iter().position(|word| *word == ".ptr");
    let own = &words[..own.unwrap_or(words.len())];
    let align = own.iter().position(|word| *word == ".align");
    let align = align.map(|at| words[at + 1].parse().unwrap());
    let element = words
        .iter()
        .find_map(|word| bytes_of(word))
        .unwrap_or_else(|| panic!("no type: {text}"));
    let name = words.last().unwrap();
    let (name, count) = match name.split_once('[') {
        Some((name, count)) => {
            let count = count.trim_end_matches(']');
            (
                name,
                if count.is_empty() {
                    0
                } else {
                    count.parse().unwrap()
                },
            )
        }
        None => (*name, 1),
    };
    (name.into(), align.unwrap_or(element), element * count)
}

/// `.global .align 4 .b8 name[2] = {1, 2}`: name, alignment, bytes, which are zero where nothing is said.
fn data(text: &str) -> (String, usize, Vec<u8>) {
    let (declaration, values) = text.split_once('=').unwrap_or((text, ""));
    let (name, align, size) = declared(declaration);
    let element = declaration
        .split_whitespace()
        .find_map(bytes_of)
        .unwrap_or(1);
    let values = values.trim().trim_start_matches('{').trim_end_matches('}');
    let mut bytes: Vec<u8> = values
        .split(',')
        .filter_map(|value| immediate(value.trim()))
        .flat_map(|value| value.to_le_bytes()[..element].to_vec())
        .collect();
    bytes.resize(size, 0);
    (name, align, bytes)
}

fn bytes_of(word: &str) -> Option<usize> {
    let bits = word
        .strip_prefix(['.'])?
        .strip_prefix(['b', 'u', 's', 'f'])?;
    bits.parse::<usize>().ok().map(|bits| bits / 8)
}

/// `.visible .entry name(.param .u64 a, ..) .maxntid 256, 1, 1 .explicitcluster .reqnctapercluster 2, 1, 1`
fn head_of(head: &str, entry: &mut Entry) {
    let (name, rest) = head.split_once('(').expect("an entry has parameters");
    entry.name = name.split_whitespace().last().unwrap().into();
    let (parameters, directives) = rest.split_once(')').unwrap();
    let parameters = parameters.split(',').filter(|text| !text.trim().is_empty());
    entry.parameters = parameters.map(declared).collect();
    for directive in directives.split('.').map(str::trim) {
        let (name, sizes) = directive.split_once(' ').unwrap_or((directive, ""));
        let sizes = sizes.split(',').filter_map(|size| size.trim().parse().ok());
        match name {
            "" | "explicitcluster" => {}
            "maxntid" | "reqntid" => entry.most_threads = Some(sizes.product()),
            "reqnctapercluster" => {
                let sizes: Vec<u32> = sizes.collect();
                entry.cluster = Some(sizes.try_into().expect("three sizes"));
            }
            _ => panic!("not known: {directives}"),
        }
    }
}

/// The text after the body in braces of a function.
fn after_body(text: &str) -> &str {
    let mut depth = 0;
    for (at, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 1 => return &text[at + 1..],
            '}' => depth -= 1,
            _ => {}
        }
    }
    ""
}

/// Fills the entry, and returns the text after its body.
fn body_of<'a>(body: &'a str, entry: &mut Entry) -> &'a str {
    let mut scopes = vec![HashMap::new()];
    let mut rest = body.trim_start();
    loop {
        if let Some(inner) = rest.strip_prefix('{') {
            scopes.push(HashMap::new());
            rest = inner.trim_start();
        } else if let Some(after) = rest.strip_prefix('}') {
            scopes.pop();
            rest = after;
            if scopes.is_empty() {
                return rest;
            }
            rest = rest.trim_start();
        } else if let Some((label, after)) = label(rest) {
            entry.labels.insert(label.into(), entry.statements.len());
            rest = after.trim_start();
        } else {
            let (text, after) = rest
                .split_once(';')
                .unwrap_or_else(|| panic!("no end: {rest}"));
            statement(text.trim(), &mut scopes, entry);
            rest = after.trim_start();
        }
    }
}

fn label(text: &str) -> Option<(&str, &str)> {
    let end = text.find(|c: char| !c.is_alphanumeric() && !"$_%".contains(c))?;
    let (name, after) = text.split_at(end);
    let after = after.strip_prefix(':')?;
    (!name.is_empty()).then_some((name, after))
}

fn statement(text: &str, scopes: &mut [HashMap<String, Register>], entry: &mut Entry) {
    if let Some(names) = text.strip_prefix(".reg") {
        let (_, names) = names.trim().split_once(char::is_whitespace).unwrap();
        let scope = scopes.last_mut().unwrap();
        let mut add = |name: String| {
            scope.insert(name, entry.registers);
            entry.registers += 1;
        };
        for name in names.split(',').map(str::trim) {
            match name.split_once('<') {
                Some((stem, count)) => {
                    let count: usize = count.trim_end_matches('>').parse().unwrap();
                    (0..count).for_each(|number| add(format!("{stem}{number}")));
                }
                None => add(name.into()),
            }
        }
        return;
    }
    if text.starts_with(".shared") {
        return entry.shared.push(declared(text));
    }
    if text.starts_with(".local") {
        return entry.local.push(declared(text));
    }
    if text.starts_with(".pragma") {
        return;
    }
    let register = |name: &str| {
        scopes
            .iter()
            .rev()
            .find_map(|scope| scope.get(name).copied())
    };
    let (guard, body) = match text.strip_prefix('@') {
        Some(guarded) => {
            let (guard, body) = guarded.split_once(char::is_whitespace).unwrap();
            let name = guard.trim_start_matches('!');
            let predicate = register(name).unwrap_or_else(|| panic!("no register: {text}"));
            (Some((predicate, guard.starts_with('!'))), body.trim_start())
        }
        None => (None, text),
    };
    let (opcode, operands) = body.split_once(char::is_whitespace).unwrap_or((body, ""));
    entry.statements.push(Statement {
        guard,
        opcode: opcode.into(),
        operands: split(operands)
            .map(|text| operand(text, &register))
            .collect(),
        text: text.split_whitespace().collect::<Vec<_>>().join(" "),
    });
}

/// Splits at commas that are not in brackets.
fn split(text: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0;
    text.split(move |c| {
        depth += i32::from("[{".contains(c)) - i32::from("]}".contains(c));
        c == ',' && depth == 0
    })
    .map(str::trim)
    .filter(|text| !text.is_empty())
}

fn operand(text: &str, register: &impl Fn(&str) -> Option<Register>) -> Operand {
    let enclosed = |open, close| text.strip_prefix(open)?.strip_suffix(close);
    if let Some(inner) = enclosed('{', '}') {
        return Operand::Vector(split(inner).map(|text| operand(text, register)).collect());
    }
    if let Some(inner) = enclosed('[', ']') {
        let mut parts = split(inner).map(|text| {
            let (base, offset) = text
                .rsplit_once('+')
                .filter(|_| !text.contains('{'))
                .unwrap_or((text, "0"));
            (
                operand(base.trim(), register),
                immediate(offset.trim()).unwrap_or_else(|| panic!("{text}")),
            )
        });
        let (base, offset) = parts.next().unwrap();
        let coordinates = match parts.next() {
            Some((Operand::Vector(coordinates), 0)) => coordinates,
            None => Vec::new(),
            _ => panic!("not known: {text}"),
        };
        return Operand::Address(Box::new(base), offset as i64, coordinates);
    }
    if let Some((result, predicate)) = text.split_once('|') {
        let of = |text: &str| operand(text.trim(), register);
        return Operand::Vector(vec![of(result), of(predicate)]);
    }
    if let Some(name) = text.strip_prefix('!') {
        let predicate = register(name).unwrap_or_else(|| panic!("no register: {text}"));
        return Operand::Not(predicate);
    }
    match (register(text), immediate(text)) {
        (Some(number), _) => Operand::Register(number),
        (None, Some(value)) => Operand::Immediate(value),
        (None, None) => Operand::Name(text.into()),
    }
}

fn immediate(text: &str) -> Option<u64> {
    // Of an unsigned number.
    let text = text.strip_suffix('U').unwrap_or(text);
    let hexadecimal = |prefixes: [&str; 2]| {
        let digits = prefixes
            .into_iter()
            .find_map(|prefix| text.strip_prefix(prefix))?;
        u64::from_str_radix(digits, 16).ok()
    };
    hexadecimal(["0f", "0F"])
        .or_else(|| hexadecimal(["0d", "0D"]))
        .or_else(|| hexadecimal(["0x", "0X"]))
        .or_else(|| text.parse::<i64>().ok().map(|value| value as u64))
        .or_else(|| text.parse::<u64>().ok())
}
