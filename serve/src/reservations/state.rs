//! The rules of persistent reservations (SPC-4, 5.13), without locks and files.

use serde::{Deserialize, Serialize};

/// Participants of one disk at most.
const PARTICIPANTS_MAX: usize = 256;

/// Whom a reservation lets read and write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Kind {
    /// The holder writes, all read.
    WriteExclusive,
    /// The holder writes and reads.
    ExclusiveAccess,
    /// All that are registered write, all read.
    WriteExclusiveRegistrants,
    /// All that are registered write and read.
    ExclusiveAccessRegistrants,
    /// As [`Kind::WriteExclusiveRegistrants`], and all of them are holders.
    WriteExclusiveAll,
    /// As [`Kind::ExclusiveAccessRegistrants`], and all of them are holders.
    ExclusiveAccessAll,
}

impl Kind {
    /// All kinds, in the order of their codes in SCSI and in NVMe.
    pub(crate) const ALL: [Self; 6] = [
        Self::WriteExclusive,
        Self::ExclusiveAccess,
        Self::WriteExclusiveRegistrants,
        Self::ExclusiveAccessRegistrants,
        Self::WriteExclusiveAll,
        Self::ExclusiveAccessAll,
    ];

    /// Whether all that are registered hold the reservation.
    pub(crate) fn is_of_all(self) -> bool {
        matches!(self, Self::WriteExclusiveAll | Self::ExclusiveAccessAll)
    }

    fn is_of_registrants(self) -> bool {
        !matches!(self, Self::WriteExclusive | Self::ExclusiveAccess)
    }

    fn reads_are_exclusive(self) -> bool {
        matches!(self, Self::ExclusiveAccess | Self::ExclusiveAccessRegistrants | Self::ExclusiveAccessAll)
    }
}

/// What a participant asks for. `key` is the one it has registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// Register `key`, or unregister if it is 0. `expected` is the key so far, 0 for none; `None`
    /// means any.
    Register {
        expected: Option<u64>,
        key: u64,
        lasts: bool,
    },
    Reserve {
        key: u64,
        kind: Kind,
    },
    Release {
        key: u64,
        kind: Kind,
    },
    /// Remove all keys and the reservation.
    Clear {
        key: u64,
    },
    /// Remove the key `other`, and take its reservation.
    Preempt {
        key: u64,
        other: u64,
        kind: Kind,
    },
    /// Reserve in the way of SPC-2: until it is released, or the session ends.
    ReserveSimply,
    ReleaseSimply,
    /// Registrations and reservation outlast a restart, or do not.
    Outlast(bool),
    /// The disk was reset: ends a reservation in the way of SPC-2.
    Reset,
}

/// Why a change is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The participant is not registered by this key, or the reservation is another's.
    Conflict,
    /// The reservation is of another kind.
    WrongRelease,
    /// Key 0 cannot be preempted.
    ZeroKey,
    /// There are too many participants.
    TooMany,
    /// The file could not be written.
    NotSaved,
}

/// What another participant has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// All keys and the reservation were removed.
    ReservationsPreempted,
    /// The reservation was released.
    ReservationsReleased,
    /// The participant's key was removed.
    RegistrationPreempted,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Registration {
    pub(crate) participant: String,
    pub(crate) key: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Reservation {
    /// Who made it. If it is of all, the others hold it too.
    pub(crate) holder: String,
    pub(crate) kind: Kind,
}

/// The keys and the reservation of a disk.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct State {
    #[serde(skip)]
    generation: u32,
    registrations: Vec<Registration>,
    reservation: Option<Reservation>,
    /// Whether it shall be there after a restart.
    lasts: bool,
    /// Who has reserved in the way of SPC-2.
    #[serde(skip)]
    simple: Option<String>,
}

impl State {
    /// A number that grows with each change of the keys.
    pub(crate) fn generation(&self) -> u32 {
        self.generation
    }

    pub(crate) fn registrations(&self) -> &[Registration] {
        &self.registrations
    }

    pub(crate) fn reservation(&self) -> Option<&Reservation> {
        self.reservation.as_ref()
    }

    /// Whether it shall be there after a restart.
    pub(crate) fn lasts(&self) -> bool {
        self.lasts
    }

    /// Whether another participant has reserved in the way of SPC-2.
    pub(super) fn is_shut_for(&self, participant: &str) -> bool {
        self.simple.as_deref().is_some_and(|holder| holder != participant)
    }

    pub(crate) fn key_of(&self, participant: &str) -> Option<u64> {
        self.registrations.iter().find(|one| one.participant == participant).map(|one| one.key)
    }

    /// Whether the participant holds the reservation.
    pub(crate) fn holds(&self, participant: &str) -> bool {
        self.reservation.as_ref().is_some_and(|reservation| {
            reservation.holder == participant || reservation.kind.is_of_all() && self.key_of(participant).is_some()
        })
    }

    /// Whether the participant may read, and whether it may write.
    pub(super) fn allows(&self, participant: &str) -> (bool, bool) {
        if self.is_shut_for(participant) {
            return (false, false);
        }
        let Some(reservation) = &self.reservation else { return (true, true) };
        let is_in =
            self.holds(participant) || reservation.kind.is_of_registrants() && self.key_of(participant).is_some();
        (is_in || !reservation.kind.reads_are_exclusive(), is_in)
    }

    /// Makes a change. Returns who is to be told of it.
    ///
    /// # Errors
    /// The change is refused, and the state must be dropped.
    pub(super) fn change(&mut self, participant: &str, change: &Change) -> Result<Vec<(String, Event)>, Refusal> {
        let mut told = Vec::new();
        let needed = match *change {
            Change::Reserve { key, .. }
            | Change::Release { key, .. }
            | Change::Clear { key }
            | Change::Preempt { key, .. } => Some(key),
            _ => None,
        };
        if needed.is_some() && self.key_of(participant) != needed {
            return Err(Refusal::Conflict);
        }
        match *change {
            Change::Register { expected, key, lasts } => {
                if expected.is_some_and(|expected| expected != self.key_of(participant).unwrap_or(0)) {
                    return Err(Refusal::Conflict);
                }
                self.register(participant, key, &mut told)?;
                self.lasts = lasts;
                self.generation = self.generation.wrapping_add(1);
            }
            Change::Reserve { kind, .. } => match &self.reservation {
                None => self.reservation = Some(Reservation { holder: participant.to_owned(), kind }),
                Some(there) if there.kind == kind && self.holds(participant) => {}
                Some(_) => return Err(Refusal::Conflict),
            },
            Change::Release { kind, .. } if self.holds(participant) => {
                if self.reservation.as_ref().is_some_and(|there| there.kind != kind) {
                    return Err(Refusal::WrongRelease);
                }
                self.release(participant, &mut told);
            }
            // Nothing is held, so nothing is released.
            Change::Release { .. } => {}
            Change::Clear { .. } => {
                let others = self.others(participant).map(|other| (other, Event::ReservationsPreempted));
                told.extend(others);
                self.registrations.clear();
                self.reservation = None;
                self.generation = self.generation.wrapping_add(1);
            }
            Change::Preempt { other, kind, .. } => {
                self.preempt(participant, other, kind, &mut told)?;
                self.generation = self.generation.wrapping_add(1);
            }
            // Both kinds of reservations exclude each other.
            Change::ReserveSimply if !self.registrations.is_empty() => return Err(Refusal::Conflict),
            Change::ReserveSimply => match &self.simple {
                Some(holder) if holder != participant => return Err(Refusal::Conflict),
                _ => self.simple = Some(participant.to_owned()),
            },
            Change::ReleaseSimply if !self.registrations.is_empty() => return Err(Refusal::Conflict),
            Change::ReleaseSimply => self.simple = self.simple.take().filter(|holder| holder != participant),
            Change::Outlast(lasts) => self.lasts = lasts,
            Change::Reset => self.simple = None,
        }
        Ok(told)
    }

    /// All that are registered, but one.
    fn others(&self, participant: &str) -> impl Iterator<Item = String> {
        let others = self.registrations.iter().filter(move |one| one.participant != participant);
        others.map(|one| one.participant.clone()).collect::<Vec<_>>().into_iter()
    }

    fn register(&mut self, participant: &str, key: u64, told: &mut Vec<(String, Event)>) -> Result<(), Refusal> {
        let is_full = self.registrations.len() >= PARTICIPANTS_MAX;
        let there = self.registrations.iter_mut().find(|one| one.participant == participant);
        match (there, key) {
            (None, 0) => {}
            (Some(one), 1..) => one.key = key,
            (None, 1..) if is_full => return Err(Refusal::TooMany),
            (None, 1..) => self.registrations.push(Registration { participant: participant.to_owned(), key }),
            (Some(_), 0) => {
                let holds = self.holds(participant);
                self.registrations.retain(|one| one.participant != participant);
                let is_of_all = self.reservation.as_ref().is_some_and(|there| there.kind.is_of_all());
                if holds && (!is_of_all || self.registrations.is_empty()) {
                    self.release(participant, told);
                }
            }
        }
        Ok(())
    }

    /// Removes the reservation. The others that are registered are told, if it was for them too.
    fn release(&mut self, participant: &str, told: &mut Vec<(String, Event)>) {
        if let Some(released) = self.reservation.take()
            && released.kind.is_of_registrants()
        {
            told.extend(self.others(participant).map(|other| (other, Event::ReservationsReleased)));
        }
    }

    fn preempt(
        &mut self,
        participant: &str,
        other: u64,
        kind: Kind,
        told: &mut Vec<(String, Event)>,
    ) -> Result<(), Refusal> {
        let of_all = self.reservation.as_ref().is_some_and(|there| there.kind.is_of_all());
        let holder_key = self.reservation.as_ref().filter(|_| !of_all).and_then(|there| self.key_of(&there.holder));
        let takes_over = if of_all { other == 0 } else { holder_key == Some(other) };
        if other == 0 && !of_all {
            return Err(Refusal::ZeroKey);
        }
        let goes = |one: &Registration| one.participant != participant && (other == 0 || one.key == other);
        if !takes_over && !self.registrations.iter().any(|one| one.key == other) {
            return Err(Refusal::Conflict);
        }
        let gone = self.registrations.iter().filter(|one| goes(one)).map(|one| one.participant.clone());
        told.extend(gone.map(|gone| (gone, Event::RegistrationPreempted)).collect::<Vec<_>>());
        self.registrations.retain(|one| !goes(one));
        if takes_over {
            let before = self.reservation.replace(Reservation { holder: participant.to_owned(), kind });
            if before.is_some_and(|before| before.kind != kind && before.kind.is_of_registrants()) {
                told.extend(self.others(participant).map(|other| (other, Event::ReservationsReleased)));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registered(keys: &[(&str, u64)]) -> State {
        let mut state = State::default();
        for &(participant, key) in keys {
            state.change(participant, &Change::Register { expected: Some(0), key, lasts: false }).unwrap();
        }
        state
    }

    /// Participants a (which reserves) and b are registered, c is not.
    #[test]
    fn each_kind_lets_in_whom_the_standard_says() {
        let (all, reads, none) = ((true, true), (true, false), (false, false));
        let expected = [
            (all, reads, reads),
            (all, none, none),
            (all, all, reads),
            (all, all, none),
            (all, all, reads),
            (all, all, none),
        ];
        for (kind, (a, b, c)) in Kind::ALL.into_iter().zip(expected) {
            let mut state = registered(&[("a", 1), ("b", 2)]);
            state.change("a", &Change::Reserve { key: 1, kind }).unwrap();
            assert_eq!((state.allows("a"), state.allows("b"), state.allows("c")), (a, b, c), "{kind:?}");
            assert_eq!(state.holds("b"), kind.is_of_all());
        }
    }

    #[test]
    fn keys_are_checked() {
        let mut state = registered(&[("a", 1)]);
        let conflict = Err(Refusal::Conflict);
        assert_eq!(state.change("a", &Change::Register { expected: Some(2), key: 3, lasts: false }), conflict);
        assert_eq!(state.change("b", &Change::Register { expected: Some(1), key: 3, lasts: false }), conflict);
        assert_eq!(state.change("a", &Change::Reserve { key: 2, kind: Kind::WriteExclusive }), conflict);
        assert_eq!(state.change("b", &Change::Clear { key: 1 }), conflict);
        state.change("a", &Change::Register { expected: Some(1), key: 9, lasts: false }).unwrap();
        assert_eq!((state.key_of("a"), state.generation()), (Some(9), 2));
    }

    #[test]
    fn a_reservation_ends_with_its_holder() {
        let unregister = Change::Register { expected: None, key: 0, lasts: false };
        for kind in Kind::ALL {
            let mut state = registered(&[("a", 1), ("b", 2)]);
            state.change("a", &Change::Reserve { key: 1, kind }).unwrap();
            let told = state.change("a", &unregister).unwrap();
            assert_eq!(state.reservation().is_some(), kind.is_of_all(), "{kind:?}");
            let is_told = kind.is_of_registrants() && !kind.is_of_all();
            assert_eq!(told, if is_told { vec![("b".into(), Event::ReservationsReleased)] } else { vec![] });
            state.change("b", &unregister).unwrap();
            assert_eq!(state.reservation(), None);
        }
    }

    #[test]
    fn a_release_names_the_kind() {
        let mut state = registered(&[("a", 1), ("b", 2)]);
        state.change("a", &Change::Reserve { key: 1, kind: Kind::WriteExclusive }).unwrap();
        let wrong = Change::Release { key: 1, kind: Kind::ExclusiveAccess };
        assert_eq!(state.change("a", &wrong), Err(Refusal::WrongRelease));
        // Another one releases nothing.
        assert_eq!(state.change("b", &Change::Release { key: 2, kind: Kind::WriteExclusive }), Ok(vec![]));
        assert!(state.reservation().is_some());
        state.change("a", &Change::Release { key: 1, kind: Kind::WriteExclusive }).unwrap();
        assert_eq!(state.reservation(), None);
    }

    #[test]
    fn a_preemption_takes_the_reservation_and_the_keys() {
        let mut state = registered(&[("a", 1), ("b", 2), ("c", 1), ("d", 4)]);
        state.change("a", &Change::Reserve { key: 1, kind: Kind::WriteExclusiveRegistrants }).unwrap();
        let told = state.change("b", &Change::Preempt { key: 2, other: 1, kind: Kind::WriteExclusive }).unwrap();
        let event = |name: &str, event| (name.to_owned(), event);
        assert_eq!(
            told,
            [
                event("a", Event::RegistrationPreempted),
                event("c", Event::RegistrationPreempted),
                event("d", Event::ReservationsReleased)
            ]
        );
        assert_eq!(state.registrations().len(), 2);
        assert_eq!(state.reservation().map(|there| there.holder.as_str()), Some("b"));
        assert_eq!(state.allows("a"), (true, false));
        // A key that is not the holder's is only removed.
        state.change("b", &Change::Preempt { key: 2, other: 4, kind: Kind::ExclusiveAccess }).unwrap();
        assert_eq!(state.reservation().map(|there| there.kind), Some(Kind::WriteExclusive));
        let nobody = Change::Preempt { key: 2, other: 9, kind: Kind::WriteExclusive };
        assert_eq!(state.change("b", &nobody), Err(Refusal::Conflict));
        let zero = Change::Preempt { key: 2, other: 0, kind: Kind::WriteExclusive };
        assert_eq!(state.change("b", &zero), Err(Refusal::ZeroKey));
    }

    #[test]
    fn key_zero_preempts_a_reservation_of_all() {
        let mut state = registered(&[("a", 1), ("b", 2)]);
        state.change("a", &Change::Reserve { key: 1, kind: Kind::ExclusiveAccessAll }).unwrap();
        state.change("b", &Change::Preempt { key: 2, other: 0, kind: Kind::WriteExclusive }).unwrap();
        assert_eq!((state.key_of("a"), state.holds("b")), (None, true));
    }

    #[test]
    fn simple_reservations_exclude_all_others() {
        let mut state = State::default();
        state.change("a", &Change::ReserveSimply).unwrap();
        assert_eq!((state.allows("a"), state.allows("b")), ((true, true), (false, false)));
        assert_eq!(state.change("b", &Change::ReserveSimply), Err(Refusal::Conflict));
        state.change("b", &Change::ReleaseSimply).unwrap();
        assert!(!state.is_shut_for("a") && state.is_shut_for("b"));
        state.change("b", &Change::Reset).unwrap();
        assert_eq!(state.allows("b"), (true, true));
        let mut state = registered(&[("a", 1)]);
        assert_eq!(state.change("b", &Change::ReserveSimply), Err(Refusal::Conflict));
    }
}
