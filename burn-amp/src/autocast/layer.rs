//! [`AutocastLayer`]: the layer that makes the ops of a device run in the dtypes of a policy.

use super::{
    AutocastDevice, Policy,
    fp8::Fp8,
    reduction::Reduction,
    region::{self, Region},
    report::Counters,
};
use burn::tensor::{DType, Device};
use burn_layer::{Cast, Inputs, Layer, Op, Plan, Ran, Run};
use std::sync::{Arc, Once};

/// The layer that autocast puts over a device.
#[derive(Clone, Debug)]
pub struct AutocastLayer {
    pub(super) policy: Arc<Policy>,
    pub(super) fp8: Option<Arc<Fp8>>,
    /// The float dtypes that the device computes in.
    pub(super) supported: Vec<DType>,
    /// In which precision the device adds up the products of convolutions in 16 bits.
    pub(super) reduction: Reduction,
    /// Whether cheap results are computed again instead of being kept.
    pub(super) recompute: bool,
    pub(super) counters: Arc<Counters>,
    /// Whether the log has warned that no layer runs in fp8 after all.
    pub(super) not_in_fp8: Arc<Once>,
}

impl AutocastLayer {
    /// The layer's counters and its fp8 state, together with the device that the layer was served on.
    pub fn on(&self, device: Device) -> AutocastDevice {
        AutocastDevice {
            device,
            counters: self.counters.clone(),
            #[cfg(feature = "fp8")]
            fp8: self.fp8.clone(),
        }
    }

    /// What a policy plans for an op.
    fn by(&self, policy: &Policy, op: Op, inputs: &Inputs) -> Plan {
        let plan = policy.plan(op, inputs);
        let plan = match policy.is_enabled() {
            true => self.reduction.plan(op, plan, inputs),
            false => plan,
        };
        self.with_recompute(policy, plan, inputs)
    }

    /// Lets cheap results be computed again, if the layer is to do so: kept results would use up memory that a low dtype saves.
    fn with_recompute(&self, policy: &Policy, plan: Plan, inputs: &Inputs) -> Plan {
        let computed = plan.compute.unwrap_or(inputs.widest);
        Plan {
            recompute: self.recompute && policy.is_enabled() && computed != DType::F64,
            ..plan
        }
    }
}

impl Layer for AutocastLayer {
    fn plan(&self, op: Op, inputs: &Inputs) -> Option<Plan> {
        Some(match inputs.scope() {
            Some(Region::Full) => region::full(inputs),
            // As without autocast.
            Some(Region::Policy(policy)) if !policy.is_enabled() => region::full(inputs),
            Some(Region::Policy(policy)) if self.supported.contains(&policy.low_dtype().into()) => {
                self.by(policy, op, inputs)
            }
            _ => {
                let plan = self.by(&self.policy, op, inputs);
                match &self.fp8 {
                    Some(fp8) if fp8.takes(op, inputs) => {
                        let as_computed = plan.compute.unwrap_or(inputs.nominal);
                        let store = Some(plan.store.unwrap_or(as_computed));
                        // The rest of the plan holds if the backend underneath has no fp8 after all.
                        Plan {
                            own: true,
                            store,
                            ..plan
                        }
                    }
                    _ => plan,
                }
            }
        })
    }

    fn run(&self, run: &Run<'_>) -> Option<Ran> {
        let ran = self.fp8.as_ref()?.run(run);
        match ran {
            Some(_) => self.counters.ran_in_fp8(run.op()),
            None => self.not_in_fp8.call_once(|| {
                log::warn!(
                    "Autocast::fp8: no layer runs in fp8 on this device, whose backend is neither Flex nor CubeCL's; they run \
                     by the policy"
                );
            }),
        }
        ran
    }

    fn ran(&self, op: Op, dtype: DType) {
        self.counters.ran(op, dtype);
    }

    fn recomputed(&self, _op: Op) {
        self.counters.recomputed();
    }

    fn cast(&self, cast: Cast) {
        self.counters.cast(cast);
    }

    fn stored(&self, dtype: DType, nominal: DType, elements: usize) {
        self.counters.stored(dtype, nominal, elements);
    }
}
