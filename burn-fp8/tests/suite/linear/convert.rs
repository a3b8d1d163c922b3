//! Layers from and to Burn's `Linear`, and from a configuration.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::Device;
use burn_fp8::recipe::{DelayedScaling, Fp8Recipe, RecipeFormat};
use burn_fp8::{Fp8Linear, Fp8LinearConfig};

use super::super::device::values;

#[test]
fn linear_there_and_back() {
    let device = Device::flex();
    let linear = LinearConfig::new(3, 2).init(&device);
    let weight = values(linear.weight.val());
    let id = linear.weight.id;
    let back: Linear = Fp8Linear::from(linear).into();
    assert_eq!((values(back.weight.val()), back.weight.id), (weight, id));
    let layer = Fp8LinearConfig::new(3, 2).with_bias(false).init(&device);
    assert!(layer.bias.is_none());
    assert_eq!(layer.recipe(), &Fp8Recipe::default());
    assert!(format!("{layer}").contains("d_output: 2"), "{layer}");
}

#[test]
fn the_record_of_a_linear_loads() {
    let device = Device::flex();
    let linear = LinearConfig::new(3, 2).init(&device);
    let record = linear.clone().into_record().allow_partial(true);
    let layer = Fp8LinearConfig::new(3, 2).init(&device).load_record(record);
    assert_eq!(values(layer.weight.val()), values(linear.weight.val()));
}

/// A `Linear` ignores the state of delayed scaling in the record.
#[test]
fn a_linear_loads_the_record() {
    let device = Device::flex();
    let layer = Fp8LinearConfig::new(3, 2).init(&device);
    let weight = values(layer.weight.val());
    let linear = || LinearConfig::new(3, 2).init(&device);
    let error = linear().try_load_record(layer.clone().into_record());
    assert!(error.unwrap_err().to_string().contains("fp8.input.scale"));
    let record = layer.into_record().allow_unused(true);
    assert_eq!(values(linear().load_record(record).weight.val()), weight);
}

#[test]
#[should_panic(expected = "Fp8LinearConfig: E5M2 alone")]
fn a_bad_recipe_panics_in_init() {
    let recipe = DelayedScaling::new().with_format(RecipeFormat::E5M2).into();
    Fp8LinearConfig::new(2, 2)
        .with_recipe(recipe)
        .init(&Device::flex());
}
