//! The recipe of a scope.

use burn::tensor::Tensor;
use burn_fp8::recipe::{
    BlockScaling, CurrentScaling, DelayedScaling, Fp8Recipe, RecipeFormat, RowwiseScaling,
};
use burn_fp8::{Fp8Error, Fp8Linear, Fp8LinearConfig, Fp8Scope, fp8_autocast};

use super::device::{Random, devices};
use super::linear::{self, pass_fp8};

fn delayed(length: usize) -> DelayedScaling {
    DelayedScaling::new().with_amax_history_len(length)
}

/// Two passes, because the second has scales that delayed scaling found in the first.
fn passes(layer: &Fp8Linear, batches: &[[Tensor<2>; 2]]) -> Vec<linear::Pass> {
    let pass = |[x, gradient]: &[Tensor<2>; 2]| pass_fp8(layer, x, gradient);
    batches.iter().map(pass).collect()
}

#[test]
fn a_scopes_recipe_is_that_of_every_layer_in_it() {
    for device in devices() {
        let device = device.autodiff();
        let mut random = Random::new(60);
        let linear = linear::linear(&mut random, 6, 3, &device);
        let batches = [(); 2].map(|()| [6, 3].map(|width| random.matrix([4, width], &device)));
        let recipes: [Fp8Recipe; 5] = [
            delayed(3).into(),
            CurrentScaling::new().into(),
            CurrentScaling::new().with_power_of_two(true).into(),
            RowwiseScaling::new().into(),
            BlockScaling::new().with_size(4).into(),
        ];
        for recipe in recipes {
            let made = Fp8Linear::from_linear(linear.clone(), recipe).unwrap();
            let expected = passes(&made, &batches);
            for other in [CurrentScaling::new().into(), Fp8Recipe::from(delayed(2))] {
                let layer = Fp8Linear::from_linear(linear.clone(), other).unwrap();
                let actual = fp8_autocast(true, recipe, || passes(&layer, &batches));
                assert_eq!(actual, expected, "{recipe:?} over {other:?}");
                assert_eq!(layer.recipe(), &other);
            }
        }
    }
}

#[test]
fn a_history_follows_the_recipe() {
    for device in devices() {
        let device = device.autodiff();
        let layer = Fp8LinearConfig::new(2, 2)
            .with_recipe(delayed(4).into())
            .init(&device);
        let pass = |amax: f32, recipe: Option<Fp8Recipe>| {
            let x = Tensor::<2>::full([1, 2], amax, &device);
            fp8_autocast(true, recipe, || layer.forward(x));
            let [input, ..] = layer.scaling_state().unwrap();
            (input.history, input.scale)
        };
        for amax in [8.0, 4.0, 2.0] {
            pass(amax, None);
        }
        assert_eq!(pass(1.0, None), (vec![0.0, 8.0, 4.0, 2.0], 56.0));
        // Shorter: the newest amaxes stay. Longer: zeros come before them.
        let short = pass(0.5, Some(delayed(2).into()));
        assert_eq!(short, (vec![0.0, 1.0], 448.0 / 2.0));
        let long = pass(0.25, Some(delayed(5).into()));
        assert_eq!(long, (vec![0.0, 0.0, 0.0, 1.0, 0.5], 448.0));
        let one = pass(0.125, Some(delayed(1).into()));
        assert_eq!(one, (vec![0.0], 448.0 * 4.0));
    }
}

#[test]
fn a_bad_recipe_is_an_error() {
    let bad = DelayedScaling::new().with_format(RecipeFormat::E5M2);
    let error = Fp8Scope::current().with_recipe(bad).unwrap_err();
    assert!(matches!(error, Fp8Error::ForwardFormat { .. }), "{error}");
    assert!(Fp8Scope::current().with_recipe(None).is_ok());
}

#[test]
#[should_panic(expected = "fp8_autocast: amax_history_len is 0")]
fn a_bad_recipe_panics_in_fp8_autocast() {
    fp8_autocast(true, delayed(0), || ());
}
