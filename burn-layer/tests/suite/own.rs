//! Ops that a layer runs itself.

use super::devices::Leased;
use burn::backend::Flex;
use burn::tensor::{DType, Device, Tensor};
use burn_backend::ops::FloatTensorOps;
use burn_layer::{
    Inputs, Layer, Layers, Made, Op, Plan, Ran, Run, WeakDescent, ops_come_whole, scoped,
};
use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering},
};

/// Runs products, `gelu`, `cat` and `argmax` itself: products by twice the right factor, which it doubles once.
#[derive(Clone, Debug, Default)]
struct Doubling {
    doubled: Arc<AtomicUsize>,
    #[allow(clippy::type_complexity)]
    seen: Arc<Mutex<Vec<(Op, Vec<Vec<usize>>, String)>>>,
    ran: Arc<Mutex<Vec<(Op, DType)>>>,
    made: Arc<Mutex<Vec<(Op, usize)>>>,
}

impl Layer for Doubling {
    fn plan(&self, op: Op, inputs: &Inputs) -> Option<Plan> {
        let own = matches!(
            op,
            Op::float_matmul | Op::gelu | Op::float_cat | Op::float_argmax
        );
        let shapes = inputs.shapes.iter().map(|shape| shape.to_vec()).collect();
        let names: Vec<_> = inputs.scopes::<String>().into_iter().cloned().collect();
        if own {
            self.seen
                .lock()
                .unwrap()
                .push((op, shapes, names.join(".")));
        }
        own.then(|| Plan::own().store(DType::BF16))
    }

    fn run(&self, run: &Run<'_>) -> Option<Ran> {
        assert_eq!(run.store(), Some(DType::BF16));
        let names = run.scopes::<String>().len();
        match run.op() {
            Op::float_matmul => run.on::<Flex>(|inputs| {
                assert_eq!(names, 2);
                let weight = &inputs[1];
                let doubled = weight.kept.with(|kept: &mut Option<_>| {
                    kept.get_or_insert_with(|| {
                        self.doubled.fetch_add(1, Ordering::Relaxed);
                        Flex::float_mul_scalar(weight.tensor(), 2f32.into())
                    })
                    .clone()
                });
                Flex::float_matmul(inputs[0].tensor(), doubled)
            }),
            Op::float_cat => run.on::<Flex>(|inputs| inputs[inputs.len() - 1].tensor()),
            op => {
                assert_eq!(op, Op::gelu);
                None
            }
        }
    }

    fn ran(&self, op: Op, dtype: DType) {
        self.ran.lock().unwrap().push((op, dtype));
    }

    fn watches(&self) -> bool {
        true
    }

    fn made(&self, made: &Made<'_>) {
        self.made.lock().unwrap().push((made.op, made.inputs.len()));
    }
}

#[test]
fn a_layer_runs_ops_itself() {
    let layer = Doubling::default();
    let device = Layers::on(Device::flex()).layer(layer.clone()).leased();
    let x = Tensor::<2>::from_floats([[1.0, 2.0], [3.0, 4.00390625]], &device);
    let weight = Tensor::<2>::eye(2, &device);
    let [outer, inner] = ["outer", "inner"].map(|name| Arc::new(String::from(name)));
    let double = |weight: &Tensor<2>| {
        scoped(&outer, || {
            scoped(&inner, || x.clone().matmul(weight.clone()))
        })
    };
    let values = |tensor: Tensor<2>| tensor.into_data().try_to_vec::<f32>().unwrap();
    // Stored in bf16, as the plan says; seen in f32.
    assert_eq!(double(&weight).dtype(), DType::F32);
    assert_eq!(values(double(&weight)), [2.0, 4.0, 6.0, 8.0]);
    assert_eq!(values(double(&weight.clone())), [2.0, 4.0, 6.0, 8.0]);
    assert_eq!(
        layer.doubled.load(Ordering::Relaxed),
        1,
        "kept with the weight"
    );
    let reshaped = weight.clone().reshape([1, 2, 2]).reshape([2, 2]);
    double(&reshaped).into_data();
    assert_eq!(layer.doubled.load(Ordering::Relaxed), 1, "the same rows");
    double(&(weight.clone() * 1.0)).into_data();
    assert_eq!(layer.doubled.load(Ordering::Relaxed), 2, "another weight");

    let expected = (
        Op::float_matmul,
        vec![vec![2, 2], vec![2, 2]],
        String::from("outer.inner"),
    );
    assert_eq!(layer.seen.lock().unwrap()[0], expected);
    let ran = || layer.ran.lock().unwrap().clone();
    assert!(
        ran().iter().all(|(op, _)| *op != Op::float_matmul),
        "the backend did not"
    );
    assert!(layer.made.lock().unwrap().contains(&(Op::float_matmul, 2)));

    // All of a list of tensors; with the last one for the result.
    let cat = Tensor::cat(vec![x.clone(), weight.clone(), x.clone()], 0);
    assert_eq!(
        cat.into_data().try_to_vec::<f32>().unwrap(),
        [1.0, 2.0, 3.0, 4.0]
    );

    // What the layer leaves, the backend runs, and what is no float tensor it always runs.
    let x = Tensor::<1>::from_floats([1.0, -1.0], &device);
    let plain = Tensor::<1>::from_floats([1.0, -1.0], &Device::flex());
    assert_eq!(x.clone().erf().into_data(), plain.erf().into_data());
    assert_eq!(x.argmax(0).into_scalar::<i64>(), 0);
    assert!(ran().contains(&(Op::float_erf, DType::F32)));
    assert!(ran().contains(&(Op::float_argmax, DType::F32)));
}

/// Counts the products whose left factor is the transposition of a tensor that was a left factor before.
#[derive(Clone, Debug, Default)]
struct Turned(Arc<AtomicUsize>);

/// Kept with a left factor.
#[derive(Default)]
struct Left;

impl Layer for Turned {
    fn plan(&self, op: Op, inputs: &Inputs) -> Option<Plan> {
        let known = inputs.kept_with_transposed(|_: &Left| ()).is_some();
        assert_eq!(inputs.mirrored, known && op == Op::float_matmul);
        assert_eq!(known, inputs.first_transposed);
        (op == Op::float_matmul).then(Plan::own)
    }

    fn run(&self, run: &Run<'_>) -> Option<Ran> {
        run.on::<Flex>(|inputs| {
            inputs[0].kept.with(|_: &mut Left| ());
            if inputs[0].transposed.is_some() {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
            Flex::float_matmul(inputs[0].tensor(), inputs[1].tensor())
        })
    }
}

/// A transposition swaps the last two dimensions, by whichever op, and knows what it was made of; its reshapes that keep them too.
#[test]
fn what_is_kept_is_found_from_the_transposition() {
    let layer = Turned::default();
    let device = Layers::on(Device::flex()).layer(layer.clone()).leased();
    // Cubes, so that shapes tell nothing.
    let found = |turn: &dyn Fn(Tensor<3>) -> Tensor<3>| {
        let x = Tensor::<3>::ones([2, 2, 2], &device);
        let before = layer.0.load(Ordering::Relaxed);
        x.clone().matmul(x.clone()).into_data();
        assert_eq!(layer.0.load(Ordering::Relaxed), before);
        turn(x.clone()).matmul(x).into_data();
        layer.0.load(Ordering::Relaxed) - before
    };
    assert_eq!(found(&|x| x.transpose()), 1);
    assert_eq!(found(&|x| x.swap_dims(1, 2)), 1);
    assert_eq!(found(&|x| x.swap_dims(2, 1)), 1);
    assert_eq!(found(&|x| x.permute([0, 2, 1])), 1);
    assert_eq!(
        found(&|x| x.transpose().reshape([1, 2, 2, 2]).reshape([2, 2, 2])),
        1
    );
    assert_eq!(found(&|x| x), 0);
    assert_eq!(found(&|x| x.swap_dims(0, 1)), 0);
    assert_eq!(found(&|x| x.swap_dims(0, 2)), 0);
    assert_eq!(found(&|x| x.permute([1, 0, 2])), 0);
    assert_eq!(found(&|x| x.permute([2, 1, 0])), 0);
    assert_eq!(found(&|x| x.transpose() * 1.0), 0);
}

/// Runs products itself, and keeps the descent of right factors.
#[derive(Clone, Debug, Default)]
struct Family(Arc<Mutex<Vec<WeakDescent>>>);

/// Kept with a right factor.
#[derive(Default)]
struct Right;

impl Layer for Family {
    fn plan(&self, op: Op, inputs: &Inputs) -> Option<Plan> {
        let known = inputs.kept_with_last_transposed(|_: &Right| ()).is_some();
        assert!(!known || inputs.last_transposed);
        (op == Op::float_matmul).then(|| match known {
            true => Plan::own().store(DType::BF16),
            false => Plan::own().store(DType::F32),
        })
    }

    fn run(&self, run: &Run<'_>) -> Option<Ran> {
        // As it was planned.
        let known = run.inputs().kept_with_last_transposed(|_: &Right| ());
        assert_eq!(known.is_some(), run.store() == Some(DType::BF16));
        run.on::<Flex>(|inputs| {
            let [left, right] = &inputs[..] else {
                panic!("a product has two factors");
            };
            right.kept.with(|_: &mut Right| ());
            // A transposition is of the family of what it was made of.
            let descent = right.kept.descent_or(|| match &right.transposed {
                Some(before) => before.descent(),
                None => Default::default(),
            });
            self.0.lock().unwrap().push(descent.downgrade());
            Flex::float_matmul(left.tensor(), right.tensor())
        })
    }
}

/// Over the steps of an optimizer, and no longer than what they make.
#[test]
fn a_descent_goes_with_the_last_of_its_tensors() {
    let layer = Family::default();
    let device = Layers::on(Device::flex()).layer(layer.clone());
    let device = device.leased();
    let x = Tensor::<2>::ones([2, 2], &device) * 2.0;
    let run = |weight: &Tensor<2>| {
        x.clone().matmul(weight.clone()).into_data();
        layer.0.lock().unwrap().last().unwrap().clone()
    };
    let weight = Tensor::<2>::ones([2, 2], &device) * 3.0;
    let other = run(&(weight.clone() * 1.0));
    device.sync().unwrap();
    assert!(other.upgrade().is_none(), "its tensor is gone");
    let first = run(&weight);
    assert!(first.upgrade().is_some() && first != other);
    let mut steps = vec![
        weight.clone() - x.clone(),
        weight.clone() + x.clone(),
        weight.clone() * 0.9,
        weight.clone() / 1.1,
        weight.clone().clamp(0.0, 1.0),
        weight.clone().transpose(),
    ];
    if ops_come_whole() {
        steps.extend([weight.clone().clamp_min(0.0), weight.clone().clamp_max(1.0)]);
    }
    for step in steps {
        assert!(run(&step) == first);
    }
    assert!(run(&weight.exp()) != first);
    device.sync().unwrap();
    assert!(first.upgrade().is_none());
}

/// What a product's right factor is, as it lies and as the program sees it.
type Factor = (Vec<usize>, Option<(Vec<usize>, Vec<f32>)>);

/// Runs products itself, looks at the right factor as it lies, and counts its uses with it.
#[derive(Clone, Debug, Default)]
struct AsItLies {
    /// How often the factor had been used when the op was planned.
    uses: Arc<Mutex<Vec<Option<usize>>>>,
    factors: Arc<Mutex<Vec<Factor>>>,
}

/// Kept with a right factor.
#[derive(Default)]
struct Uses(usize);

impl Layer for AsItLies {
    fn plan(&self, op: Op, inputs: &Inputs) -> Option<Plan> {
        if op != Op::float_matmul {
            return None;
        }
        let uses = inputs.kept_with_last(|Uses(uses)| *uses);
        self.uses.lock().unwrap().push(uses);
        Some(Plan::own())
    }

    fn run(&self, run: &Run<'_>) -> Option<Ran> {
        run.on::<Flex>(|inputs| {
            let [x, weight] = <[_; 2]>::try_from(inputs).unwrap();
            weight.kept.with(|Uses(uses)| *uses += 1);
            let product = Flex::float_matmul(x.tensor(), weight.tensor());
            let shape = weight.shape().to_vec();
            let lies = weight.untransposed().map(|weight| {
                // Of another tensor: nothing was kept with that one.
                weight.kept.with(|Uses(uses)| assert_eq!(*uses, 0));
                let shape = weight.shape().to_vec();
                let data = burn_std::future::block_on(Flex::float_into_data(weight.tensor()));
                (shape, data.unwrap().try_to_vec().unwrap())
            });
            self.factors.lock().unwrap().push((shape, lies));
            product
        })
    }
}

#[test]
fn a_factor_is_also_there_as_it_lies() {
    let layer = AsItLies::default();
    let device = Layers::on(Device::flex()).layer(layer.clone()).leased();
    let x = Tensor::<2>::from_floats([[1.0, 2.0]], &device);
    let weight = Tensor::<2>::from_floats([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], &device);
    let turned = weight.clone().transpose();
    let values = |tensor: Tensor<2>| tensor.into_data().try_to_vec::<f32>().unwrap();
    let product = || values(x.clone().matmul(turned.clone()));
    assert_eq!(product(), [5.0, 11.0, 17.0]);
    assert_eq!(product(), [5.0, 11.0, 17.0]);
    let square = x.clone().transpose();
    assert_eq!(values(square.clone().matmul(x)), [1.0, 2.0, 2.0, 4.0]);
    let lies = (vec![3, 2], vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let turned = (vec![2, 3], Some(lies));
    let factors = layer.factors.lock().unwrap().clone();
    assert_eq!(factors, [turned.clone(), turned, (vec![1, 2], None)]);
    assert_eq!(*layer.uses.lock().unwrap(), [None, Some(1), None]);
}
