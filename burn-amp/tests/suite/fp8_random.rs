//! Random casts, products and layers of burn-fp8 on layered devices: they give what they give on the plain device, bit for bit.

use burn::{
    module::Param,
    nn::Linear,
    tensor::{Device, FloatDType, Tensor, TensorData},
};
use burn_amp::{
    Autocast, Policy,
    recipe::{BlockScaling, CurrentScaling, DelayedScaling, Fp8Recipe, RowwiseScaling},
};
use burn_fp8::{Fp8Cast, Fp8Format, Fp8Linear, Fp8Tensor, Granularity, scaled_matmul_with_amax};
use proptest::{prelude::*, sample::select};

use super::{alone::alone, random_cases::check};

#[derive(Clone, Debug)]
struct Case {
    /// Rows, inner dimension and columns.
    sizes: [usize; 3],
    batch: usize,
    granularities: [Granularity; 2],
    formats: [Fp8Format; 2],
    dtypes: [FloatDType; 2],
    transposed: bool,
    recipe: Fp8Recipe,
}

fn cases() -> impl Strategy<Value = Case> {
    let size = || prop_oneof![1 => Just(0usize), 9 => 1usize..20];
    let block = |rows, columns| Granularity::Block { rows, columns };
    let granularities = vec![
        Granularity::Tensor,
        Granularity::Row,
        Granularity::Column,
        block(1, 8),
        block(3, 5),
    ];
    let granularity = || select(granularities.clone());
    let format = || select(Fp8Format::ALL.to_vec());
    let dtypes = vec![FloatDType::F32, FloatDType::BF16, FloatDType::F16];
    let dtype = || select(dtypes.clone());
    let recipes: Vec<Fp8Recipe> = vec![
        DelayedScaling::new().with_amax_history_len(3).into(),
        CurrentScaling::new().into(),
        RowwiseScaling::new().into(),
        BlockScaling::new().with_size(8).into(),
    ];
    (
        [size(), size(), size()],
        0usize..4,
        [granularity(), granularity()],
        [format(), format()],
        [dtype(), dtype()],
        any::<bool>(),
        select(recipes),
    )
        .prop_map(
            |(sizes, batch, granularities, formats, dtypes, transposed, recipe)| Case {
                sizes,
                batch,
                granularities,
                formats,
                dtypes,
                transposed,
                recipe,
            },
        )
}

fn wave<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    let values = (0..shape.iter().product()).map(|place: usize| (place as f32 * 0.77).sin());
    Tensor::from_data(TensorData::new(values.collect(), shape), device)
}

/// What the case gives on a device.
fn run(case: &Case, device: &Device) -> Vec<TensorData> {
    let [m, k, n] = case.sizes;
    let [dtype, output] = case.dtypes;
    let x = match case.transposed {
        true => wave([case.batch, k, m], device).swap_dims(1, 2),
        false => wave([case.batch, m, k], device),
    };
    let x = x.cast(dtype);
    let cast = |tensor, side: usize| {
        let cast = Fp8Cast::new(case.granularities[side], case.formats[side]);
        Fp8Tensor::quantize_as(tensor, cast).expect("a cast of matrices")
    };
    let (lhs, rhs) = (cast(x.clone(), 0), cast(wave([1, k, n], device), 1));
    let bias = Some(wave([n], device));
    let (product, amax) = scaled_matmul_with_amax(&lhs, &rhs, bias, output).expect("they fit");
    let mut seen = vec![
        lhs.scale().into_data(),
        lhs.dequantize(output).into_data(),
        product.into_data(),
        amax.into_data(),
    ];

    let linear = Linear {
        weight: Param::from_tensor(wave([k, n], &device.clone().autodiff())),
        bias: Some(Param::from_tensor(wave([n], &device.clone().autodiff()))),
    };
    let layer = Fp8Linear::from_linear(linear, case.recipe).expect("the recipe is valid");
    for _ in 0..2 {
        let x = Tensor::from_inner(x.clone()).require_grad();
        let output = layer.forward(x.clone());
        seen.push(output.clone().inner().into_data());
        let gradients = output.cast(FloatDType::F32).powi_scalar(2).sum().backward();
        seen.extend(x.grad(&gradients).map(Tensor::into_data));
        seen.extend(layer.weight.val().grad(&gradients).map(Tensor::into_data));
    }
    seen
}

#[test]
fn fp8_on_layers_is_as_on_the_plain_device() {
    alone(
        "suite::fp8_random::fp8_on_layers_is_as_on_the_plain_device",
        || {
            check(40, cases(), |case| {
                let plain = run(case, &Device::flex());
                let lease = Autocast::new(Policy::o0()).lease(Device::flex());
                let lease = lease.expect("Flex carries autocast");
                let found = run(case, &lease.device());
                prop_assert_eq!(plain.len(), found.len());
                for (plain, found) in plain.into_iter().zip(found) {
                    prop_assert_eq!(plain.shape(), found.shape());
                    prop_assert_eq!(plain.dtype(), found.dtype());
                    prop_assert_eq!(plain.as_bytes(), found.as_bytes());
                }
                Ok(())
            });
        },
    );
}
