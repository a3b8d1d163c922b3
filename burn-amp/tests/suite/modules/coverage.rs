//! The cases against the sources of burn-nn: a module of a new version is noticed.

use self::sources::sources_of;
use super::Case;
use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};
use syn::{Attribute, Ident, Item, Visibility};

#[path = "../../../../burn-layer/tests/suite/sources.rs"]
mod sources;

/// Every case there is.
fn all() -> Vec<Case> {
    let groups = [
        super::activations::cases(),
        super::layers::cases(),
        super::losses::cases(),
        super::norms::cases(),
        super::random::cases(),
        super::sequences::cases(),
        super::spatial::cases(),
    ];
    groups.into_iter().flatten().collect()
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("burn-nn's sources are there");
    let paths = entries.map(|entry| entry.expect("a folder that can be read").path());
    paths
        .flat_map(|path| match path.is_dir() {
            true => rust_files(&path),
            false => vec![path],
        })
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .collect()
}

fn derives_module(attributes: &[Attribute]) -> bool {
    let mut derives = attributes
        .iter()
        .filter(|one| one.path().is_ident("derive"));
    derives.any(|derive| {
        let mut found = false;
        let parsed = derive.parse_nested_meta(|meta| {
            found |= meta.path.is_ident("Module");
            Ok(())
        });
        parsed.expect("a list of traits");
        found
    })
}

/// The public modules and losses of burn-nn, by the names of their types.
fn modules() -> BTreeSet<String> {
    let sources = sources_of("burn-nn");
    let mut modules = BTreeSet::new();
    for path in rust_files(&sources) {
        let is_loss = |name: &Ident| {
            path.starts_with(sources.join("loss")) && name.to_string().ends_with("Loss")
        };
        let text = std::fs::read_to_string(&path).expect("burn-nn's sources are there");
        // Modules inside of `mod tests` are items of that item, and not of the file.
        for item in syn::parse_file(&text)
            .expect("burn-nn's sources parse")
            .items
        {
            let (visibility, name, attributes) = match item {
                Item::Struct(item) => (item.vis, item.ident, item.attrs),
                Item::Enum(item) => (item.vis, item.ident, item.attrs),
                _ => continue,
            };
            let public = matches!(visibility, Visibility::Public(_));
            if public && (derives_module(&attributes) || is_loss(&name)) {
                modules.insert(name.to_string());
            }
        }
    }
    modules
}

/// Modules that no program outside of burn-nn can run by themselves.
const EXEMPT: [&str; 1] = [
    // Its output is a `TransformerDecoderInput`, whose fields are private: `TransformerDecoder`
    // runs it.
    "TransformerDecoderLayer",
];

#[test]
fn every_module_and_loss_of_burn_nn_has_a_case() {
    let mut covered: BTreeSet<_> = all().iter().map(|case| case.module.to_owned()).collect();
    for exempt in EXEMPT {
        assert!(covered.insert(exempt.to_owned()), "{exempt} has a case");
    }
    assert_eq!(covered, modules(), "left: the cases, right: burn-nn");
}
