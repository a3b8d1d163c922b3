//! Machine code in words, and the lengths of its loops.

use std::{collections::HashMap, process::Command};

use super::super::nvrtc::missing;

/// The instructions of machine code, if there is a disassembler.
pub(super) fn disassemble(binary: &[u8], toolkit: &std::path::Path) -> Option<String> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), binary).unwrap();
    let own = toolkit.join("bin/nvdisasm");
    let program = if own.exists() { own } else { "nvdisasm".into() };
    match Command::new(program).arg(file.path()).output() {
        Ok(output) if output.status.success() => Some(String::from_utf8(output.stdout).unwrap()),
        _ => {
            missing("no nvdisasm");
            None
        }
    }
}

/// The instruction in a line of machine code.
fn instruction(line: &str) -> Option<&str> {
    let (place, rest) = line.trim().strip_prefix("/*")?.split_once("*/")?;
    (!place.contains('x') && rest.contains(';')).then_some(rest)
}

/// The numbers of instructions from one step of `wgmma` to the next, and from the last one until its sums are stored.
pub(super) fn lengths(code: &str) -> (usize, usize) {
    let instructions: Vec<&str> = code.lines().filter_map(instruction).collect();
    let places = |name: &str| -> Vec<usize> {
        let found = instructions.iter().enumerate();
        let found = found.filter(|(_, instruction)| instruction.contains(name));
        found.map(|(place, _)| place).collect()
    };
    let multiplies = places("QGMMA");
    let stored = places("STG").pop().expect("it stores");
    // Without TMA loads there is one step in the loop. Otherwise there are four, which are not all alike.
    let last = multiplies[multiplies.len() - 1];
    let step = match multiplies.len() {
        4 => longest_loop(code),
        count => (last - multiplies[count / 4 - 1]) / 3,
    };
    (step, stored - last)
}

/// The number of instructions in the longest loop of some machine code: from a label to the branch back to it.
pub(super) fn longest_loop(code: &str) -> usize {
    let (mut labels, mut count, mut longest) = (HashMap::new(), 0, 0);
    for line in code.lines() {
        if let Some(label) = line.trim().strip_suffix(':') {
            labels.insert(label.to_string(), count);
        } else if let Some(instruction) = instruction(line) {
            count += 1;
            let target = instruction.split_once("BRA").and_then(|(_, to)| {
                let (_, label) = to.split_once("`(")?;
                labels.get(label.split_once(')')?.0)
            });
            longest = target.map_or(longest, |start| longest.max(count - start));
        }
    }
    longest
}
