//! A new connection: ICReq, then Connect, which makes it the admin queue of a new controller or an
//! I/O queue of one that exists. And the properties of a controller.

use super::{
    admin::check_transport,
    auth::{Auth, Parties},
    controller::{ENTRIES_MAX, QUEUES_MAX},
    seats::Seats,
    state::{Admin, Nvme, PduEnd, Phase, Queue, TRANSFER_BYTES, VERSION},
};
use crate::net::{connection::Connection, core::Core, outbox::Share, protocol::SessionEnd};
use diskwright_nvme::wire::{
    Command, Completion, ConnectData, DISCOVERY_NQN, Initialize, PduError, PduKind, Sgl, Status, auth,
    fabrics::{self, ANY_CONTROLLER, ConnectCommand, NO_FLOW_CONTROL, invalid_command, invalid_data, property},
};

/// The property "controller capabilities": entries of a queue less one, contiguous queues, 15 s to
/// become ready, and the NVM command set.
const CAPABILITIES: u64 = (ENTRIES_MAX as u64 - 1) | 1 << 16 | 30 << 24 | 1 << 37;

impl Core<Nvme> {
    /// ICReq.
    pub(super) fn initialize(&mut self, conn: &mut Connection<Nvme>) -> Result<(), PduEnd> {
        let Some(asked) = conn.window.bytes().first_chunk().map(Initialize::decode) else { return Ok(()) };
        conn.window.consume(Initialize::BYTES);
        if asked.version != 0 {
            let found = asked.version.into();
            return Err(PduError::Field { what: "the version of the PDU formats", found, expected: "0" }.into());
        }
        if asked.alignment > Initialize::ALIGNMENT_MAX {
            let found = asked.alignment.into();
            return Err(PduError::Field { what: "the alignment of data", found, expected: "0 to 31" }.into());
        }
        let granted = Initialize { version: 0, alignment: 0, digests: asked.digests, limit: TRANSFER_BYTES as u32 };
        conn.outbox.put(&granted.encode(PduKind::InitializeResponse), &mut self.pool);
        conn.session.digests = asked.digests;
        conn.session.alignment_bytes = 4 * (usize::from(asked.alignment) + 1);
        conn.session.phase = Phase::Connect;
        Ok(())
    }

    /// A command before Connect, or on an admin queue, or a fabrics command.
    pub(super) fn take_admin_command(
        &mut self,
        conn: &mut Connection<Nvme>,
        command: &Command,
        data: &[u8],
    ) -> Result<(), SessionEnd> {
        let is_fabrics = command.opcode == fabrics::OPCODE;
        let Some(queue) = conn.session.queue() else {
            if !is_fabrics || command.nsid as u8 != fabrics::CONNECT {
                self.complete(conn, command.cid, Status::SEQUENCE);
                return Ok(());
            }
            let done = self.connect(conn, command, data);
            let refused = (!done.status.is_success()).then(|| format!("connect was refused: {}", done.status));
            self.complete_with(conn, done);
            return refused.map_or(Ok(()), |reason| Err(SessionEnd::Told(reason)));
        };
        if is_fabrics && command.nsid as u8 == auth::SEND {
            let status = self.auth_send(conn, command, data);
            self.complete(conn, command.cid, status);
        } else if is_fabrics && command.nsid as u8 == auth::RECEIVE {
            return self.auth_receive(conn, command);
        } else if !queue.is_known {
            self.complete(conn, command.cid, Status::AUTHENTICATION);
        } else if is_fabrics {
            let done = self.property(conn, command);
            self.complete_with(conn, done);
        } else if queue.controller.is_ready() {
            self.admin_command(conn, command, data);
        } else {
            self.complete(conn, command.cid, Status::SEQUENCE);
        }
        Ok(())
    }

    fn connect(&mut self, conn: &mut Connection<Nvme>, command: &Command, data: &[u8]) -> Completion {
        let failed = |status| Completion { cid: command.cid, status, ..Completion::default() };
        let asked = match ConnectCommand::of(command) {
            Ok(asked) => asked,
            Err(status) => return failed(status),
        };
        if command.sgl.kind != Sgl::IN_CAPSULE {
            return failed(Status::SGL_TYPE);
        }
        let Some(data) = data.first_chunk::<{ ConnectData::BYTES }>() else { return failed(Status::SGL_LENGTH) };
        let data = match ConnectData::decode(data, command.cid) {
            Ok(data) => data,
            Err(done) => return done,
        };
        if asked.entries < 2 || asked.entries > u32::from(ENTRIES_MAX) {
            return invalid_command(command.cid, 44);
        }
        if data.subsystem != self.shared.subsystem && data.subsystem != DISCOVERY_NQN {
            tracing::warn!(peer = %conn.peer, host = %data.host, subsystem = %data.subsystem,
                "refused: this server has no such subsystem");
            return invalid_data(command.cid, 256);
        }
        let queue =
            if asked.queue == 0 { self.connect_admin(conn, &asked, &data) } else { self.connect_queue(&asked, &data) };
        match queue {
            Ok(mut queue) => {
                // What the discovery subsystem tells is no secret.
                if self.shared.secrets.is_some() && !queue.controller.is_discovery {
                    (queue.auth, queue.is_known) = (Some(Auth::Wanted), false);
                }
                let required = if queue.is_known { 0 } else { auth::REQUIRED };
                let result = u64::from(queue.controller.id) | required;
                if !queue.controller.is_discovery {
                    conn.session.seats = Seats::of(queue.controller.host_id, &self.exports, &self.reservations);
                }
                conn.session.phase = Phase::Queue(queue);
                Completion { result, cid: command.cid, ..Completion::default() }
            }
            Err(Refused::Status(status)) => failed(status),
            Err(Refused::Command(at_bytes)) => invalid_command(command.cid, at_bytes),
            Err(Refused::Data(at_bytes)) => invalid_data(command.cid, at_bytes),
        }
    }

    fn connect_admin(
        &mut self,
        conn: &Connection<Nvme>,
        asked: &ConnectCommand,
        data: &ConnectData,
    ) -> Result<Queue, Refused> {
        if data.controller != ANY_CONTROLLER {
            return Err(Refused::Data(16));
        }
        let controller = self.shared.create(data, asked.keep_alive_ms).ok_or(Refused::Status(Status::CONNECT_BUSY))?;
        let (number, discovery) = (controller.id, controller.is_discovery);
        tracing::info!(peer = %conn.peer, host = %data.host, controller = number, discovery, "connected a controller");
        let admin = Some(Box::new(Admin::new(self.now_ns)));
        Ok(Queue { admin, ..queue_of(controller, asked, 0) })
    }

    fn connect_queue(&mut self, asked: &ConnectCommand, data: &ConnectData) -> Result<Queue, Refused> {
        let controller = self.shared.find(data.controller).ok_or(Refused::Data(16))?;
        if controller.host != data.host || controller.host_id != data.host_id {
            return Err(Refused::Data(512));
        }
        let is_discovery = data.subsystem == DISCOVERY_NQN;
        if controller.is_discovery || is_discovery || asked.queue > QUEUES_MAX {
            return Err(Refused::Command(42));
        }
        if !controller.is_ready() {
            return Err(Refused::Status(Status::SEQUENCE));
        }
        let time = controller.add_queue(asked.queue).ok_or(Refused::Command(42))?;
        Ok(queue_of(controller, asked, time))
    }

    /// A message of the authentication.
    fn auth_send(&mut self, conn: &mut Connection<Nvme>, command: &Command, data: &[u8]) -> Status {
        let Some(secrets) = self.shared.secrets.as_ref().map(|secrets| secrets.current()) else {
            return Status::INVALID_OPCODE;
        };
        let message = match auth::length_of(command) {
            Ok(len_bytes) if command.sgl.kind == Sgl::IN_CAPSULE => data.get(..len_bytes),
            Ok(_) => return Status::SGL_TYPE,
            Err(status) => return status,
        };
        let (Some(message), Some(queue)) = (message, conn.session.queue_mut()) else { return Status::SGL_LENGTH };
        let host = queue.controller.host.clone();
        let Some(auth) = &mut queue.auth else { return Status::INVALID_OPCODE };
        auth.take(&Parties { secrets: &secrets, host: &host, subsystem: &self.shared.subsystem }, message);
        queue.is_known |= auth.is_done();
        Status::SUCCESS
    }

    /// The host asks for a message of the authentication.
    fn auth_receive(&mut self, conn: &mut Connection<Nvme>, command: &Command) -> Result<(), SessionEnd> {
        let room = auth::length_of(command).and_then(|room_bytes| {
            check_transport(command, room_bytes)?;
            Ok(room_bytes)
        });
        let given = conn.session.queue_mut().and_then(|queue| {
            let given = queue.auth.as_mut()?.give();
            queue.is_known |= queue.auth.as_ref().is_some_and(Auth::is_done);
            given
        });
        let (room_bytes, (mut message, end)) = match (room, given) {
            (Ok(room_bytes), Some(given)) => (room_bytes, given),
            (Err(status), _) => {
                self.complete(conn, command.cid, status);
                return Ok(());
            }
            (Ok(_), None) => {
                self.complete(conn, command.cid, Status::SEQUENCE);
                return Ok(());
            }
        };
        message.resize(room_bytes, 0);
        // Answers that the host does not read count in its share.
        let share = Share::of(room_bytes);
        conn.share.add(share);
        conn.outbox.count(share);
        self.put_page(conn, command.cid, &message);
        end.map_or(Ok(()), |why| Err(SessionEnd::Told(format!("the authentication has failed: {why}"))))
    }

    /// Gets or sets a property.
    fn property(&mut self, conn: &Connection<Nvme>, command: &Command) -> Completion {
        let failed = |status| Completion { cid: command.cid, status, ..Completion::default() };
        let Some(queue) = conn.session.queue().filter(|queue| queue.id == 0) else {
            return failed(Status::INVALID_FIELD);
        };
        let [attributes, offset, low, ..] = command.cdw;
        let is_long = attributes & 1 != 0;
        let result = match (command.nsid as u8, offset, is_long) {
            (fabrics::PROPERTY_GET, property::CAPABILITIES, true) => CAPABILITIES,
            (fabrics::PROPERTY_GET, property::VERSION, false) => VERSION.into(),
            (fabrics::PROPERTY_GET, property::CONFIGURATION, false) => queue.controller.configuration().into(),
            (fabrics::PROPERTY_GET, property::STATUS, false) => queue.controller.status().into(),
            (fabrics::PROPERTY_SET, property::CONFIGURATION, false) => {
                queue.controller.configure(low);
                0
            }
            (fabrics::PROPERTY_GET | fabrics::PROPERTY_SET, ..) => return failed(Status::INVALID_FIELD),
            _ => return failed(Status::INVALID_OPCODE),
        };
        Completion { result, cid: command.cid, ..Completion::default() }
    }
}

/// Why a queue is not connected.
enum Refused {
    Status(Status),
    /// A field of the command at this offset.
    Command(u16),
    /// A field of the data at this offset.
    Data(u16),
}

fn queue_of(controller: std::sync::Arc<super::controller::Controller>, asked: &ConnectCommand, time: u32) -> Queue {
    Queue {
        controller,
        id: asked.queue,
        entries: asked.entries as u16,
        head: (asked.attributes & NO_FLOW_CONTROL == 0).then_some(0),
        time,
        auth: None,
        is_known: true,
        admin: None,
    }
}
