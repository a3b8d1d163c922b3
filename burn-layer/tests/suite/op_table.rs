//! The op table against the sources of Burn's op traits.

use self::sources::sources_of;
use burn_layer::Op;
use std::collections::BTreeSet;
use syn::{FnArg, Item, TraitItem};

#[path = "sources.rs"]
mod sources;

/// Not in the table: these belong to the autodiff backend, whose tensors a layer never sees.
const AUTODIFF_ONLY: [&str; 6] = [
    "float_detach",
    "float_set_require_grad",
    "float_is_require_grad",
    "q_detach",
    "q_set_require_grad",
    "q_is_require_grad",
];

/// The methods of a trait in Burn's sources: name, and whether an argument is a float tensor.
fn methods(file: &str, name: &str) -> Vec<(String, bool)> {
    let path = sources_of("burn-backend").join("backend/ops").join(file);
    let source = std::fs::read_to_string(&path).expect("Burn's sources are there");
    let parsed = syn::parse_file(&source).expect("Burn's sources parse");
    let found = parsed.items.iter().find_map(|item| match item {
        Item::Trait(item) if item.ident == name => Some(item),
        _ => None,
    });
    let found = found.unwrap_or_else(|| panic!("no trait {name} in {file}"));
    let methods = found.items.iter().filter_map(|item| match item {
        TraitItem::Fn(method) => Some(method),
        _ => None,
    });
    methods
        .map(|method| {
            let takes_float = method.sig.inputs.iter().any(|argument| match argument {
                FnArg::Typed(argument) => {
                    let names = type_names(&argument.ty);
                    names.contains("FloatTensor") || names.contains("TensorPrimitive")
                }
                FnArg::Receiver(_) => false,
            });
            (method.sig.ident.to_string(), takes_float)
        })
        .collect()
}

fn type_names(ty: &syn::Type) -> BTreeSet<String> {
    #[derive(Default)]
    struct Names(BTreeSet<String>);
    impl syn::visit::Visit<'_> for Names {
        fn visit_path_segment(&mut self, segment: &syn::PathSegment) {
            self.0.insert(segment.ident.to_string());
            syn::visit::visit_path_segment(self, segment);
        }
    }
    let mut names = Names::default();
    syn::visit::Visit::visit_type(&mut names, ty);
    names.0
}

const TRAITS: [(&str, &str); 6] = [
    ("tensor.rs", "FloatTensorOps"),
    ("int_tensor.rs", "IntTensorOps"),
    ("bool_tensor.rs", "BoolTensorOps"),
    ("qtensor.rs", "QTensorOps"),
    ("activation.rs", "ActivationOps"),
    ("modules/base.rs", "ModuleOps"),
];

#[test]
fn every_op_of_burns_traits_is_in_the_table() {
    let mut seen = 0;
    for (file, name) in TRAITS {
        for (method, takes_float) in methods(file, name) {
            if AUTODIFF_ONLY.contains(&method.as_str()) {
                continue;
            }
            let op = Op::from_name(&method)
                .unwrap_or_else(|| panic!("{name}::{method} is not in the op table of burn-layer"));
            assert_eq!(op.trait_name(), name, "{method}");
            assert_eq!(op.takes_float(), takes_float, "{name}::{method}");
            seen += 1;
        }
    }
    assert_eq!(seen, Op::ALL.len(), "the table has ops that Burn has not");
}

#[test]
fn indices_and_names_agree() {
    for (index, op) in Op::ALL.iter().enumerate() {
        assert_eq!(op.index(), index);
        assert_eq!(Op::from_name(op.name()), Some(*op));
        assert_eq!(op.to_string(), op.name());
    }
}
